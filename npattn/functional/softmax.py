"""softmax and log_softmax along an axis, each beside its vjp."""

from typing import Any

from npattn._arrays import accumulation_dtype, array_module
from npattn._check import float_dtype
from npattn._typing import Array, Pullback


def softmax(x: Array, axis: int = -1) -> Array:
    """Softmax along one axis: ``p = exp(x − max x) / Σ exp(x − max x)``.

    Parameters
    ----------
    x : float ndarray
        Any shape. −inf entries get probability exactly 0.
    axis : int, default -1

    Returns
    -------
    p : ndarray
        Shape and dtype of x; computed in float32 or wider. A slice of nothing but −inf is all 0, never NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import softmax
    >>> softmax(np.log(np.array([1.0, 2.0, 5.0])))
    array([0.125, 0.25 , 0.625])
    """
    xp, p, total = _exponentials(x, axis)
    p /= xp.where(total == 0, total.dtype.type(1), total)
    return p.astype(x.dtype, copy=False)


def softmax_vjp(x: Array, axis: int = -1) -> tuple[Array, Pullback]:
    """Softmax and its pullback ``dp -> dx = p (dp − Σ dp p)``.

    Parameters
    ----------
    x : float ndarray
    axis : int, default -1
        As in ``softmax``.

    Returns
    -------
    p : ndarray, shape of x
    pullback : callable
        ``pullback(dp) -> dx``, both of the shape of x.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import softmax_vjp
    >>> p, pullback = softmax_vjp(np.zeros(4))
    >>> p.tolist(), pullback(np.array([4.0, 0.0, 0.0, 0.0])).tolist()
    ([0.25, 0.25, 0.25, 0.25], [0.75, -0.25, -0.25, -0.25])
    """
    p = softmax(x, axis)

    def pullback(dp: Array) -> Array:
        wide = accumulation_dtype(dp.dtype)
        dx = dp.astype(wide, copy=False) * p
        dx -= p * dx.sum(axis=axis, keepdims=True)
        return dx.astype(dp.dtype, copy=False)

    return p, pullback


def log_softmax(x: Array, axis: int = -1) -> Array:
    """``x − log Σ exp x`` along one axis, without overflow.

    Parameters
    ----------
    x : float ndarray
    axis : int, default -1

    Returns
    -------
    y : ndarray
        Shape and dtype of x. A slice of nothing but −inf stays −inf.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import log_softmax
    >>> log_softmax(np.array([1000.0, 1000.0])).round(4)
    array([-0.6931, -0.6931])
    """
    xp = array_module(x)
    float_dtype("x", x.dtype)
    wide = x.astype(accumulation_dtype(x.dtype), copy=False)
    m = _finite_max(wide, axis)
    y = wide - m
    total = xp.exp(y).sum(axis=axis, keepdims=True)
    y -= xp.log(xp.where(total == 0, total.dtype.type(1), total))
    return y.astype(x.dtype, copy=False)


def log_softmax_vjp(x: Array, axis: int = -1) -> tuple[Array, Pullback]:
    """log_softmax and its pullback ``dy -> dx = dy − exp(y) Σ dy``.

    Parameters
    ----------
    x : float ndarray
    axis : int, default -1
        As in ``log_softmax``.

    Returns
    -------
    y : ndarray, shape of x
    pullback : callable
        ``pullback(dy) -> dx``, both of the shape of x.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import log_softmax_vjp
    >>> y, pullback = log_softmax_vjp(np.zeros(4))
    >>> pullback(np.array([1.0, 0.0, 0.0, 0.0])).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    y = log_softmax(x, axis)

    def pullback(dy: Array) -> Array:
        total = dy.sum(axis=axis, keepdims=True, dtype=accumulation_dtype(dy.dtype))
        return (dy - array_module(y).exp(y) * total).astype(dy.dtype, copy=False)  # type: ignore[no-any-return]

    return y, pullback


def _exponentials(x: Array, axis: int) -> tuple[Any, Array, Array]:
    xp = array_module(x)
    float_dtype("x", x.dtype)
    wide = x.astype(accumulation_dtype(x.dtype), copy=False)
    p = wide - _finite_max(wide, axis)
    xp.exp(p, out=p)
    return xp, p, p.sum(axis=axis, keepdims=True)


def _finite_max(x: Array, axis: int) -> Array:
    """The maximum, or 0 where it is −inf: −inf − (−inf) would be NaN."""
    xp = array_module(x)
    if x.shape[axis] == 0:
        return x.sum(axis=axis, keepdims=True)  # type: ignore[no-any-return]
    m = x.max(axis=axis, keepdims=True)
    return xp.where(m == -xp.inf, m.dtype.type(0), m)  # type: ignore[no-any-return]


__all__ = ["log_softmax", "log_softmax_vjp", "softmax", "softmax_vjp"]
