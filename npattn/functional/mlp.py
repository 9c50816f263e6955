"""mlp: two linear maps with an activation between them, beside its vjp."""

from typing import Any

from npattn._typing import Array, Pullback
from npattn.functional._products import Sum, products, sum_rows
from npattn.functional.activation import ACTIVATIONS
from npattn.functional.linear import Map, linears
from npattn.kernels.linear import few_rows


def mlp(x: Array, up: Map, down: Map, activation: str = "gelu", *, added: Array | None = None) -> Array:
    """``linear(activation(linear(x, *up)), *down, added=added)``.

    Parameters
    ----------
    x : ndarray, shape (..., in_dim)
    up : (weight, bias)
        Of shapes (hidden_dim, in_dim) and (hidden_dim,); the bias may be None.
    down : (weight, bias)
        Of shapes (out_dim, hidden_dim) and (out_dim,); the bias may be None.
    activation : {"gelu", "gelu_tanh", "silu"}
    added : ndarray, shape (..., out_dim), optional
        A residual connection.

    Returns
    -------
    y : ndarray, shape (..., out_dim)

    Notes
    -----
    The activation is taken of each part of the first product while it is in the cache.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import mlp
    >>> mlp(np.array([1.0, -1.0]), (np.eye(2), None), (np.ones((1, 2)), np.zeros(1))).round(4)
    array([0.6827])
    """
    return _down(_hidden(x, up, activation, keep=False), down, x, added)


def mlp_vjp(
    x: Array, up: Map, down: Map, activation: str = "gelu", *, added: Array | None = None
) -> tuple[Array, Pullback]:
    """``mlp`` and its pullback dy -> (dx, dup, ddown), pairs (dweight, dbias).

    Keeps x and the hidden layer before its activation. The gradient of ``added`` is dy.

    Parameters
    ----------
    x, up, down, activation, added
        As in ``mlp``.

    Returns
    -------
    y : ndarray, shape (..., out_dim)
    pullback : callable
        ``pullback(dy) -> (dx, (dweight, dbias), (dweight, dbias))``, dbias None where bias was None.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import mlp_vjp
    >>> y, pullback = mlp_vjp(np.zeros(1), (np.ones((1, 1)), None), (np.full((1, 1), 3.0), np.zeros(1)))
    >>> dx, dup, ddown = pullback(np.ones(1))
    >>> dx.tolist(), dup[0].tolist(), ddown[1].tolist()
    ([1.5], [[0.0]], [1.0])
    """
    h, a = _hidden(x, up, activation, keep=True)
    y = _down(a, down, x, added)

    def pullback(dy: Array) -> tuple[Array, Map, Map]:
        rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        # y = a · downᵀ, a = activation(h): made again, which costs less than to keep it out of the cache
        ((dh, a),) = products(Sum(((drows, down[0]),), activation=activation, slope_at=h))
        # h = x · upᵀ
        dx, dup, ddown = products(Sum(((dh, up[0]),)), Sum(((dh.T, rows),)), Sum(((drows.T, a),)))
        dup_bias = None if up[1] is None else sum_rows(dh)
        ddown_bias = None if down[1] is None else sum_rows(drows)
        return dx.reshape(x.shape), (dup, dup_bias), (ddown, ddown_bias)

    return y, pullback


def _down(a: Array, down: Map, x: Array, added: Array | None) -> Array:
    """The second map of the hidden rows, with the leading axes of x."""
    y = linears(a, (down,), added)[0]
    return y.reshape(*x.shape[:-1], y.shape[1])


def _hidden(x: Array, up: Map, activation: str, keep: bool) -> Any:
    """The rows of the hidden layer behind the activation; before it too to ``keep`` both."""
    rows = x.reshape(-1, x.shape[-1])
    if few_rows(rows, up[:1]) is None:
        return products(Sum(((rows, up[0].T),), up[1], activation=activation, keep=keep))[0]
    (h,) = linears(rows, (up,))
    a = ACTIVATIONS[activation][0](h)
    return (h, a) if keep else a


__all__ = ["mlp", "mlp_vjp"]
