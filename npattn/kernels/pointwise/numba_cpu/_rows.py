# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""Rows added up by id: an embedding's gradient.

A unit owns COLUMNS columns of the result and adds up all rows there, in their order: nobody else writes them.
"""

from typing import Final

import numpy as np

from npattn._typing import Array
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd.vectors import add, lesser, load, load_int64, load_scalar, store, store_scalar
from npattn.kernels.pointwise.numba_cpu._call import LANES, ONE, F, run, word

COLUMNS: Final = 32


@part()
def _add(x, y, n):
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        store(y + 4 * i, add(load(y + 4 * i, ONE), load(x + 4 * i, ONE)))
    for i in range(whole, n):
        store_scalar(y + 4 * i, load_scalar(y + 4 * i, ONE) + load_scalar(x + 4 * i, ONE))


@part()
def _sum_columns(where, start, stop):
    count, dim = word(where, 0), word(where, 1)
    rows, ids, y = word(where, 2), word(where, 3), word(where, 4)
    first = start * COLUMNS
    width = lesser(stop * COLUMNS, dim) - first
    for i in range(count):
        _add(rows + 4 * (i * dim + first), y + 4 * (load_int64(ids + 8 * i) * dim + first), width)


@jit
def _sum_units(where, start, stop, scratch, one):
    _sum_columns(where, start, stop)


def sum_of_rows(rows: Array, ids: Array, like: Array) -> Array:
    """See ``arrays.sum_of_rows``."""
    y = np.zeros(like.shape, F)
    count, dim = rows.shape
    run(_sum_units, -(-dim // COLUMNS), count, dim, address(rows), address(ids), address(y))
    return y


__all__ = ["sum_of_rows"]
