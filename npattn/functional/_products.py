"""Products and sums of arrays in their own dtype, accumulated in float32 where it is narrower.

NumPy multiplies bfloat16 matrices in float32 and leaves the product there, refuses it in ``einsum``, and sums
float16 over rows in float16.
"""

import numpy as np

from npattn._arrays import accumulation_dtype
from npattn._typing import Array
from npattn.kernels.linear import product


def matmul(a: Array, b: Array) -> Array:
    """``a @ b`` in the dtype both promote to."""
    kernel = product(a, b)
    if kernel is not None:
        c: Array = kernel(a, b)
        return c
    c = a @ b
    return c.astype(_common(a, b), copy=False)


def einsum(subscripts: str, a: Array, b: Array) -> Array:
    """``np.einsum(subscripts, a, b)`` in the dtype both promote to."""
    dtype = _common(a, b)
    wide = accumulation_dtype(dtype)
    result: Array = np.einsum(subscripts, a.astype(wide, copy=False), b.astype(wide, copy=False))
    return result.astype(dtype, copy=False)


def sum_rows(rows: Array) -> Array:
    """``rows.sum(axis=0)`` in the dtype of rows."""
    total: Array = rows.sum(axis=0, dtype=accumulation_dtype(rows.dtype))
    return total.astype(rows.dtype, copy=False)


def _common(a: Array, b: Array) -> np.dtype[np.generic]:
    return a.dtype if a.dtype == b.dtype else np.result_type(a.dtype, b.dtype)


__all__ = ["einsum", "matmul", "sum_rows"]
