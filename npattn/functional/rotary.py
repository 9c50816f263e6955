"""rotary, the rotation of feature pairs by position, beside its vjp."""

from npattn._arrays import accumulation_dtype, array_module
from npattn._check import float_dtype
from npattn._typing import Array, Pullback


def rotary(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
    """Rotate pairs of features of each row by the row's angles.

    With ``half = cos.shape[-1]``, pair p is the features p and p + half, or 2p and 2p + 1 when interleaved::

        y1 = x1 · cos − x2 · sin
        y2 = x2 · cos + x1 · sin

    Parameters
    ----------
    x : float ndarray, shape (..., length, head_dim)
    cos, sin : ndarrays, shape (..., length, rotary_dim / 2)
        Of each row's angles; broadcast against x's leading axes as NumPy does (insert the heads axis when
        positions differ by batch element).
    interleaved : bool, default False
        False: halves (GPT-NeoX, Llama in Hugging Face's files). True: neighbours (GPT-J, the paper).

    Returns
    -------
    y : ndarray
        Shape and dtype of x. Features beyond rotary_dim pass through.

    Raises
    ------
    ValueError
        When cos and sin differ in shape, or ask for more features than there are.

    References
    ----------
    Su et al., RoFormer, arXiv:2104.09864, equation 34.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import rotary
    >>> quarter = np.array([[np.pi / 2]])
    >>> rotary(np.array([[1.0, 0.0]]), np.cos(quarter), np.sin(quarter)).round(6)
    array([[0., 1.]])
    """
    if cos.shape != sin.shape:
        raise ValueError(f"cos and sin must have one shape, got {cos.shape} and {sin.shape}")
    float_dtype("x", x.dtype)
    half = cos.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(
            f"cos and sin rotate 2 · {half} features, but x has only {x.shape[-1]}: "
            f"x {x.shape}, cos {cos.shape}"
        )
    xp = array_module(x, cos, sin)
    dtype = accumulation_dtype(x.dtype)
    cos, sin = cos.astype(dtype, copy=False), sin.astype(dtype, copy=False)
    y = xp.empty(x.shape, x.dtype)
    y[..., 2 * half :] = x[..., 2 * half :]
    x1, x2 = _pairs(x, half, interleaved)
    y1, y2 = _pairs(y, half, interleaved)
    y1[...] = x1 * cos - x2 * sin
    y2[...] = x2 * cos + x1 * sin
    return y  # type: ignore[no-any-return]


def rotary_vjp(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> tuple[Array, Pullback]:
    """``rotary`` and its pullback dy -> dx: the rotation back. cos and sin are constants.

    Parameters
    ----------
    x, cos, sin, interleaved
        As in ``rotary``.

    Returns
    -------
    y : ndarray, shape of x
    pullback : callable
        ``pullback(dy) -> dx``, both of the shape of x.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import rotary_vjp
    >>> quarter = np.zeros((1, 1)), np.ones((1, 1))  # cos and sin of a quarter turn
    >>> y, pullback = rotary_vjp(np.array([[3.0, 0.0]]), *quarter)
    >>> (y + 0.0).tolist(), (pullback(y) + 0.0).tolist()
    ([[0.0, 3.0]], [[3.0, 0.0]])
    """

    def pullback(dy: Array) -> Array:
        return rotary(dy, cos, -sin, interleaved=interleaved)

    return rotary(x, cos, sin, interleaved=interleaved), pullback


def _pairs(x: Array, half: int, interleaved: bool) -> tuple[Array, Array]:
    """Views of the first and the second member of each pair, (..., half)."""
    if interleaved:
        return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


__all__ = ["rotary", "rotary_vjp"]
