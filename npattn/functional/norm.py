"""layer_norm and rms_norm over the last axis, each beside its vjp."""

from npattn._arrays import array_module
from npattn._check import float_dtype
from npattn._typing import Array, Pullback
from npattn.kernels.pointwise import implementation


def layer_norm(x: Array, weight: Array, bias: Array | None = None, eps: float = 1e-5) -> Array:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift.

    ``y = (x − mean) / sqrt(var + eps) · weight + bias``, var being the mean squared deviation (divided by the
    number of features, not by one less).

    Parameters
    ----------
    x : float ndarray, shape (..., features)
    weight : ndarray, shape (features,)
    bias : ndarray, shape (features,), optional
        None adds nothing.
    eps : float, default 1e-5

    Returns
    -------
    y : ndarray
        Shape and dtype of x. Sums are kept in float32 or wider.

    Raises
    ------
    ValueError
        When weight or bias is not (features,).

    References
    ----------
    Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450, equations 3 and 4.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import layer_norm
    >>> layer_norm(np.array([[1.0, 3.0]]), np.ones(2), np.zeros(2), eps=0.0)
    array([[-1.,  1.]])
    """
    rows = _rows(x, weight, bias)
    return implementation(rows, weight, bias).layer_norm(rows, weight, bias, eps)[0].reshape(x.shape)  # type: ignore[no-any-return]


def layer_norm_vjp(
    x: Array, weight: Array, bias: Array | None = None, eps: float = 1e-5
) -> tuple[Array, Pullback]:
    """``layer_norm`` and its pullback dy -> (dx, dweight, dbias), dbias None where bias was None.

    Keeps x, weight, and one mean and one reciprocal deviation a row.

    Parameters
    ----------
    x, weight, bias, eps
        As in ``layer_norm``.

    Returns
    -------
    y : ndarray, shape of x
    pullback : callable
        ``pullback(dy) -> (dx, dweight, dbias)``, each with its argument's shape.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import layer_norm_vjp
    >>> y, pullback = layer_norm_vjp(np.array([[1.0, 3.0]]), np.ones(2), np.zeros(2), eps=0.0)
    >>> dx, dweight, dbias = pullback(np.array([[1.0, 0.0]]))
    >>> y.tolist(), dweight.tolist(), dbias.tolist()
    ([[-1.0, 1.0]], [-1.0, 0.0], [1.0, 0.0])
    """
    rows = _rows(x, weight, bias)
    y, mean, rstd = implementation(rows, weight, bias).layer_norm(rows, weight, bias, eps)

    def pullback(dy: Array) -> tuple[Array, Array, Array | None]:
        drows = _rows(dy, weight, None)
        run = implementation(drows, rows, weight).layer_norm_backward
        dx, dweight, dbias = run(drows, rows, weight, mean, rstd)
        return dx.reshape(x.shape), dweight, dbias if bias is not None else None

    return y.reshape(x.shape), pullback


def rms_norm(x: Array, weight: Array, eps: float = 1e-6) -> Array:
    """Divide the last axis by its root mean square, then scale: ``y = x / sqrt(mean(x²) + eps) · weight``.

    Parameters
    ----------
    x : float ndarray, shape (..., features)
    weight : ndarray, shape (features,)
    eps : float, default 1e-6

    Returns
    -------
    y : ndarray
        Shape and dtype of x. Sums are kept in float32 or wider.

    Raises
    ------
    ValueError
        When weight is not (features,).

    References
    ----------
    Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467, equation 4.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import rms_norm
    >>> rms_norm(np.array([[1.0, 7.0]]), np.ones(2), eps=0.0)
    array([[0.2, 1.4]])
    """
    rows = _rows(x, weight, None)
    return implementation(rows, weight).rms_norm(rows, weight, eps)[0].reshape(x.shape)  # type: ignore[no-any-return]


def rms_norm_vjp(x: Array, weight: Array, eps: float = 1e-6) -> tuple[Array, Pullback]:
    """``rms_norm`` and its pullback dy -> (dx, dweight). Keeps x, weight and one number a row.

    Parameters
    ----------
    x, weight, eps
        As in ``rms_norm``.

    Returns
    -------
    y : ndarray, shape of x
    pullback : callable
        ``pullback(dy) -> (dx, dweight)``, each with its argument's shape.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import rms_norm_vjp
    >>> y, pullback = rms_norm_vjp(np.array([[2.0, 2.0]]), np.ones(2), eps=0.0)
    >>> dx, dweight = pullback(np.array([[1.0, 0.0]]))
    >>> y.tolist(), dx.tolist(), dweight.tolist()
    ([[1.0, 1.0]], [[0.25, -0.25]], [1.0, 0.0])
    """
    rows = _rows(x, weight, None)
    y, rstd = implementation(rows, weight).rms_norm(rows, weight, eps)

    def pullback(dy: Array) -> tuple[Array, Array]:
        drows = _rows(dy, weight, None)
        dx, dweight = implementation(drows, rows, weight).rms_norm_backward(drows, rows, weight, rstd)
        return dx.reshape(x.shape), dweight

    return y.reshape(x.shape), pullback


def _rows(x: Array, weight: Array, bias: Array | None) -> Array:
    """X as (rows, features), C-contiguous."""
    float_dtype("x", x.dtype)
    features = x.shape[-1] if x.ndim else 0
    for name, array in (("weight", weight), ("bias", bias)):
        if array is not None and array.shape != (features,):
            raise ValueError(
                f"{name} must have one entry for each feature of the last axis of x: x {x.shape}, "
                f"{name} {array.shape}"
            )
    return array_module(x).ascontiguousarray(x).reshape(-1, features)  # type: ignore[no-any-return]


__all__ = ["layer_norm", "layer_norm_vjp", "rms_norm", "rms_norm_vjp"]
