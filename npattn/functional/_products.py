"""Products and sums of arrays in their own dtype, accumulated in float32 where it is narrower.

NumPy multiplies bfloat16 matrices in float32 and leaves the product there, refuses it in ``einsum``, and sums
float16 over rows in float16.
"""

from collections.abc import Sequence

import numpy as np

from npattn._arrays import accumulation_dtype
from npattn._typing import Array
from npattn.kernels.linear import products as fast_products

Sum = tuple[Sequence[tuple[Array, Array]], Array | None]


def products(*sums: Sum) -> list[Array]:
    """``Σ a @ b + bias`` for each of ``sums``, a sum being its terms (a, b) and a bias or None.

    What does not wait for each other is better one call than several: see ``npattn.kernels.linear``.
    """
    kernel = fast_products(sums)
    if kernel is not None:
        results: list[Array] = kernel(sums)
        return results
    results = []
    for terms, bias in sums:
        c, *others = (_product(a, b) for a, b in terms)
        for other in others:
            c += other
        if bias is not None:
            c += bias
        results.append(c)
    return results


def matmul(a: Array, b: Array) -> Array:
    """``a @ b`` in the dtype both promote to."""
    return products((((a, b),), None))[0]


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


__all__ = ["einsum", "matmul", "products", "sum_rows"]
