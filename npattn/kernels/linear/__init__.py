"""Products with a weight, float32 on the CPU, where BLAS can be beaten.

Two modules' worth of it in ``numba_cpu``: ``rows(x, weight)``, ``x · weightᵀ`` for a few rows of x, as in
decoding, which is one reading of the weight; and ``product(a, b, bias)``, any matrices of some size. NumPy's
BLAS reads the weight of a single row at about half the speed memory allows. Of large products it makes nine
tenths of what the vector units can do, but its idle threads look for work for 20 ms, on the same processors
as ours.
"""

import importlib
from functools import cache
from typing import Any, Final

import numpy as np

from npattn._typing import Array

#: Up to this many rows, ``rows`` is the faster one.
MOST_ROWS: Final = 4

#: Smaller weights stay with BLAS: reading them takes a few microseconds either way.
LEAST_SIZE: Final = 1 << 15

#: Products of fewer multiply-adds stay with BLAS, which does not wake its threads for them either.
LEAST_WORK: Final = 1 << 18


def few_rows(x: Array, weight: Array) -> Any:
    """The function ``rows(x, weight)`` for this x (rows, in_dim) and weight (out_dim, in_dim), or None."""
    if len(x) > MOST_ROWS or weight.size < LEAST_SIZE:
        return None
    if not all(_is_plain(array) and array.flags.c_contiguous for array in (x, weight)):
        return None
    module = _module()
    return None if module is None else module.rows


def product(a: Array, b: Array) -> Any:
    """The function ``product(a, b, bias=None)`` for these a (m, k) and b (k, n), or None for BLAS."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] * b.size < LEAST_WORK or a.shape[1] != b.shape[0]:
        return None
    if not (_is_plain(a) and _is_plain(b)) or 4 not in b.strides:
        return None
    module = _module()
    return module.product if module is not None and module.IS_FAST else None


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


__all__ = ["few_rows", "product"]
