"""linear: the product with a weight matrix."""

from npattn._typing import Array
from npattn.functional._products import matmul
from npattn.kernels.linear import few_rows


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """``x · weightᵀ + bias``.

    Parameters
    ----------
    x : ndarray, shape (..., in_dim)
    weight : ndarray, shape (out_dim, in_dim)
    bias : ndarray, shape (out_dim,), optional

    Returns
    -------
    y : ndarray, shape (..., out_dim)

    Notes
    -----
    All leading axes are rows of one matmul by the array module's BLAS. A few rows of float32, as in decoding
    a token, go through a kernel that reads the weight once at the speed of memory.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import linear
    >>> linear(np.array([1.0, 2.0]), np.array([[1.0, 1.0], [0.0, 3.0]]), np.array([0.5, 0.0]))
    array([3.5, 6. ])
    """
    rows = x.reshape(-1, x.shape[-1])
    kernel = few_rows(rows, weight)
    y: Array = matmul(rows, weight.T) if kernel is None else kernel(rows, weight)
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], weight.shape[0])


__all__ = ["linear"]
