"""Linear attention: contract, arrays (NumPy, CuPy), Numba."""

import importlib
from functools import cache
from typing import Any

import numpy as np

from npattn._typing import Array
from npattn.kernels.linear_attention.contract import Forward, Grads, State


def implementation(*arrays: Array) -> Any:
    """The module that computes with these arrays: a ``contract.Implementation``.

    Numba's for NumPy arrays of float32 or float64 in which something is to be computed, else that of arrays.
    """
    dtype = arrays[0].dtype
    if dtype in (np.float32, np.float64) and all(
        type(x) is np.ndarray and x.dtype == dtype and x.size for x in arrays
    ):
        module = _numba()
        if module is not None:
            return module
    return importlib.import_module("npattn.kernels.linear_attention.arrays")


@cache
def _numba() -> Any:
    """None when Numba is missing, or cannot run compiled (NUMBA_DISABLE_JIT)."""
    try:
        module = importlib.import_module("npattn.kernels.linear_attention.numba_cpu")
    except ImportError:
        return None
    return module if module.USABLE else None


__all__ = ["Forward", "Grads", "State", "implementation"]
