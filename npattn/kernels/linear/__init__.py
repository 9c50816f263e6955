"""``x · weightᵀ`` for a few rows of x: the matmul of decoding, which is one reading of the weight.

BLAS is made for large products. With one row its matrix-vector product reads the weight at about half the
speed memory allows; ``numba_cpu`` reads it once, in order, from all threads.
"""

import importlib
from functools import cache
from typing import Any, Final

import numpy as np

from npattn._typing import Array

#: From this many rows on BLAS is faster: its tiles are filled.
MOST_ROWS: Final = 4

#: Smaller weights stay with BLAS: reading them takes a few microseconds either way.
LEAST_SIZE: Final = 1 << 15


def implementation(x: Array, weight: Array) -> Any:
    """The module that computes ``rows(x, weight)`` for this x (rows, in_dim), or None for BLAS."""
    if len(x) > MOST_ROWS or weight.size < LEAST_SIZE:
        return None
    for array in (x, weight):
        if type(array) is not np.ndarray or array.dtype != np.float32 or not array.flags.c_contiguous:
            return None
    return _module()


@cache
def _module() -> Any:
    """None when Numba is missing, or cannot run compiled (NUMBA_DISABLE_JIT)."""
    try:
        module = importlib.import_module("npattn.kernels.linear.numba_cpu")
    except ImportError:
        return None
    return module if module.USABLE else None


__all__ = ["implementation"]
