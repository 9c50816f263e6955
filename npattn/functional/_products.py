"""Products and sums of arrays in their own dtype, accumulated in float32 where it is narrower.

NumPy multiplies bfloat16 matrices in float32 and leaves the product there, refuses it in ``einsum``, and sums
float16 over rows in float16.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from npattn._arrays import accumulation_dtype
from npattn._typing import Array
from npattn.functional.activation import ACTIVATIONS
from npattn.kernels.linear import Sum
from npattn.kernels.linear import products as fast_products


def products(*sums: Sum) -> list[Any]:
    """The result of each ``Sum``.

    What does not wait for each other is better one call than several: see ``npattn.kernels.linear``.
    """
    kernel = fast_products(sums)
    results: list[Any] = kernel(sums) if kernel is not None else [_in_arrays(*wanted) for wanted in sums]
    return results


def _in_arrays(
    terms: Sequence[tuple[Array, Array]],
    bias: Array | None,
    added: Array | None,
    activation: str | None,
    keep: bool,
    slope_at: Array | None,
) -> Any:
    c, *others = (_product(a, b) for a, b in terms)
    for other in (*others, bias, added):
        if other is not None:
            c += other
    if activation is None:
        return c
    forward, backward = ACTIVATIONS[activation]
    if slope_at is not None:
        return backward(c, slope_at), forward(slope_at)
    return (c, forward(c)) if keep else forward(c)


def matmul(a: Array, b: Array) -> Array:
    """``a @ b`` in the dtype both promote to."""
    c: Array = products(Sum(((a, b),)))[0]
    return c


def _product(a: Array, b: Array) -> Array:
    c: Array = a @ b
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


__all__ = ["Sum", "einsum", "matmul", "products", "sum_rows"]
