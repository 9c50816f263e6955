# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""Heads side by side: the copy between attention and the projection behind it."""

import numpy as np

from npattn._typing import Array
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd.vectors import lesser, load, load_scalar, store, store_scalar
from npattn.kernels.pointwise.numba_cpu._call import LANES, ONE, F, block, run, word


@part()
def _copy(x, y, n):
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        store(y + 4 * i, load(x + 4 * i, ONE))
    for i in range(whole, n):
        store_scalar(y + 4 * i, load_scalar(x + 4 * i, ONE))


@part()
def _merge_blocks(where, start, stop):
    rows, height, length, heads, dim = (
        word(where, 0),
        word(where, 1),
        word(where, 2),
        word(where, 3),
        word(where, 4),
    )
    x, x_batch, x_head, x_row, y = (
        word(where, 5),
        word(where, 6),
        word(where, 7),
        word(where, 8),
        word(where, 9),
    )
    for row in range(start * height, lesser(stop * height, rows)):
        source = x + row // length * x_batch + row % length * x_row
        for head in range(heads):
            _copy(source + head * x_head, y + 4 * dim * (row * heads + head), dim)


@jit
def _merge_units(where, start, stop, scratch, one):
    _merge_blocks(where, start, stop)


def merge_heads(x: Array) -> Array:
    """See ``arrays.merge_heads``."""
    batch, heads, length, dim = x.shape
    if x.strides[3] != 4:
        x = np.ascontiguousarray(x)
    y = np.empty((batch, length, heads * dim), F)
    rows, height = batch * length, block(heads * dim)
    sizes = (rows, height, length, heads, dim)
    run(_merge_units, -(-rows // height) if y.size else 0, *sizes, address(x), *x.strides[:3], address(y))
    return y


__all__ = ["merge_heads"]
