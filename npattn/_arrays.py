"""Which array module an array belongs to, and the dtypes attention computes in. No mathematics.

CuPy is never imported here: an array can only be a CuPy array if somebody imported CuPy already, so
``sys.modules`` is enough to ask.
"""

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from npattn._typing import Array

_FLOATS = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


def is_cupy(array: object) -> bool:
    """Whether ``array`` lives on a GPU."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def array_module(*arrays: object) -> Any:
    """The module (NumPy or CuPy) of ``arrays``; ``None`` entries are ignored.

    Raises
    ------
    TypeError
        When CPU and GPU arrays are mixed: nothing is copied between devices silently.
    """
    if "cupy" not in sys.modules:
        return np
    on_gpu = [is_cupy(array) for array in arrays if array is not None]
    if not any(on_gpu):
        return np
    if not all(on_gpu):
        raise TypeError(
            "all arrays of one call must be on the same device; got both NumPy and CuPy arrays. "
            "Move them with cupy.asarray(x) or cupy.asnumpy(x)."
        )
    return sys.modules["cupy"]


@lru_cache(maxsize=64)
def is_attention_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether attention computes in ``dtype``: float16, bfloat16, float32 or float64."""
    return dtype in _FLOATS or dtype.name == "bfloat16"


@lru_cache(maxsize=64)
def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Sums are kept in float64 for float64, in float32 for everything narrower."""
    return np.dtype(np.float64) if dtype.newbyteorder("=") == np.float64 else np.dtype(np.float32)


def to_numpy(array: Any) -> Array:
    """``array`` on the CPU: itself, or a copy of what is on the GPU."""
    result: Array = array.get() if is_cupy(array) else np.asarray(array)
    return result


def contiguous_last_axis(array: Array) -> Array:
    """``array`` itself when its last axis is contiguous, else a C-ordered copy.

    Every other stride may be anything: negative, zero, not a multiple of the row.
    """
    if array.shape[-1] <= 1 or array.strides[-1] == array.itemsize:
        return array
    copy: Array = array_module(array).ascontiguousarray(array)
    return copy
