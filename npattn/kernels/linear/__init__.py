"""Products with a weight, float32 on the CPU, where BLAS can be beaten.

``numba_cpu`` has two kinds: ``rows_of_each(x, weights)``, ``x · weightᵀ`` for a few rows of x as in decoding,
one reading of the weights; and ``products(sums)``, of any matrices of some size. NumPy's BLAS reads the
weight of a single row at about half the speed memory allows. Of large products it makes nine tenths of what
the vector units can do, but its idle threads look for work for 20 ms, on the same processors as ours.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from npattn._typing import Array

#: Up to this many rows, ``rows`` is the faster one.
MOST_ROWS: Final = 4

#: Smaller weights stay with BLAS: reading them takes a few microseconds either way.
LEAST_SIZE: Final = 1 << 15

#: Columns that an activation follows are whole vectors, of up to this many elements.
WIDEST: Final = 16

#: Products of fewer multiply-adds, all together, stay with BLAS: for them it wakes no threads either.
LEAST_WORK: Final = 1 << 18


def few_rows(x: Array, weights: Sequence[Array]) -> Any:
    """The function ``rows_of_each(x, weights)`` for x (rows, in_dim), weights (out_dim, in_dim), or None."""
    if len(x) > MOST_ROWS or sum(weight.size for weight in weights) < LEAST_SIZE:
        return None
    if not all(_is_plain(array) and array.flags.c_contiguous for array in (x, *weights)):
        return None
    module = _module()
    return None if module is None else module.rows_of_each


class Sum(NamedTuple):
    """``C = Σ a @ b + bias + added``, and what follows.

    With an ``activation`` ("gelu", "gelu_tanh", "silu") the result is that of C, or to ``keep`` both
    (C, that of C); with ``slope_at`` beside it, (C times the activation's slope at that array, the activation
    of that array).
    """

    terms: Sequence[tuple[Array, Array]]
    bias: Array | None = None
    added: Array | None = None
    activation: str | None = None
    keep: bool = False
    slope_at: Array | None = None


def products(sums: Sequence[Sum]) -> Any:
    """The function ``products(sums)`` for these, or None for BLAS."""
    work = 0
    for terms, bias, added, activation, _, slope_at in sums:
        for array in (bias, added, slope_at):
            if array is not None and not (_is_plain(array) and array.flags.c_contiguous):
                return None
        if activation is not None and terms[0][1].shape[-1] % WIDEST:
            return None
        for a, b in terms:
            if not (_is_plain(a) and _is_plain(b)) or a.ndim != 2 or b.ndim != 2 or 4 not in b.strides:
                return None
            if not b.size or a.shape[1] != b.shape[0]:
                return None
            work += a.shape[0] * b.size
    if work < LEAST_WORK:
        return None
    module = _module()
    return module.products if module is not None and module.IS_FAST else None


def _is_plain(array: Array) -> bool:
    return type(array) is np.ndarray and array.dtype == np.float32


@cache
def _module() -> Any:
    """None when Numba is missing, or cannot run compiled (NUMBA_DISABLE_JIT)."""
    try:
        module = importlib.import_module("npattn.kernels.linear.numba_cpu")
    except ImportError:
        return None
    return module if module.USABLE else None


__all__ = ["Sum", "few_rows", "products"]
