"""linear: the product with a weight matrix."""

from collections.abc import Sequence

from npattn._typing import Array, Pullback
from npattn.functional._products import Sum, products, sum_rows
from npattn.kernels.linear import few_rows

#: weight (out_dim, in_dim) and bias (out_dim,) or None
Map = tuple[Array, Array | None]


def linear(x: Array, weight: Array, bias: Array | None = None, *, added: Array | None = None) -> Array:
    """``x · weightᵀ + bias + added``.

    Parameters
    ----------
    x : ndarray, shape (..., in_dim)
    weight : ndarray, shape (out_dim, in_dim)
    bias : ndarray, shape (out_dim,), optional
    added : ndarray, shape (..., out_dim), optional
        A residual connection.

    Returns
    -------
    y : ndarray, shape (..., out_dim)

    Notes
    -----
    All leading axes are rows of one matmul: our own for float32 on the CPU, else that of the array module's
    BLAS. A few rows of float32, as in decoding a token, go through a kernel that reads the weight once at the
    speed of memory.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import linear
    >>> linear(np.array([1.0, 2.0]), np.array([[1.0, 1.0], [0.0, 3.0]]), np.array([0.5, 0.0]))
    array([3.5, 6. ])
    """
    return linears(x, ((weight, bias),), added)[0]


def linear_vjp(
    x: Array, weight: Array, bias: Array | None = None, *, added: Array | None = None
) -> tuple[Array, Pullback]:
    """``linear`` and its pullback dy -> (dx, dweight, dbias), dbias None where bias was None.

    Keeps x and weight. The gradient of ``added`` is dy.

    Parameters
    ----------
    x, weight, bias, added
        As in ``linear``.

    Returns
    -------
    y : ndarray, shape (..., out_dim)
    pullback : callable
        ``pullback(dy) -> (dx, dweight, dbias)``: ``dy · weight``, ``dyᵀ · x`` and ``Σ dy`` over all rows.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import linear_vjp
    >>> y, pullback = linear_vjp(np.array([[1.0, 2.0]]), np.array([[1.0, 1.0], [0.0, 3.0]]), np.zeros(2))
    >>> dx, dweight, dbias = pullback(np.array([[1.0, 10.0]]))
    >>> dx.tolist(), dweight.tolist(), dbias.tolist()
    ([[1.0, 31.0]], [[1.0, 2.0], [10.0, 20.0]], [1.0, 10.0])
    """
    (y,), back = linears_vjp(x, ((weight, bias),), added)

    def pullback(dy: Array) -> tuple[Array, Array, Array | None]:
        dx, ((dweight, dbias),) = back((dy,))
        return dx, dweight, dbias

    return y, pullback


def linears(x: Array, maps: Sequence[Map], added: Array | None = None) -> list[Array]:
    """``linear(x, weight, bias, added=added)`` for each of several (weight, bias), as one call."""
    rows = x.reshape(-1, x.shape[-1])
    weights = [weight for weight, _ in maps]
    few = few_rows(rows, weights)
    more = None if added is None else added.reshape(-1, added.shape[-1])
    if few is None:
        ys = products(*(Sum(((rows, weight.T),), bias, more) for weight, bias in maps))
    else:
        ys = few(rows, weights)
        for y, (_, bias) in zip(ys, maps, strict=True):
            for term in (bias, more):
                if term is not None:
                    y += term
    return [y.reshape(*x.shape[:-1], y.shape[1]) for y in ys]


def linears_vjp(x: Array, maps: Sequence[Map], added: Array | None = None) -> tuple[list[Array], Pullback]:
    """``linears`` and its pullback dys -> (dx, [(dweight, dbias), ...]).

    ::

    dx      = Σ dy · weight
    dweight = dyᵀ · x
    dbias   = Σ dy
    """

    def pullback(dys: Sequence[Array]) -> tuple[Array, list[Map]]:
        rows = x.reshape(-1, x.shape[-1])
        drows = [dy.reshape(-1, len(weight)) for dy, (weight, _) in zip(dys, maps, strict=True)]
        terms = [(drow, weight) for drow, (weight, _) in zip(drows, maps, strict=True)]
        dx, *dweights = products(Sum(terms), *(Sum(((drow.T, rows),)) for drow in drows))
        dbiases = [None if bias is None else sum_rows(d) for d, (_, bias) in zip(drows, maps, strict=True)]
        return dx.reshape(x.shape), list(zip(dweights, dbiases, strict=True))

    return linears(x, maps, added), pullback


__all__ = ["linear", "linear_vjp"]
