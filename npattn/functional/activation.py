"""gelu, silu and the gated product of SwiGLU, each beside its vjp."""

from collections.abc import Callable

from npattn._arrays import array_module
from npattn._check import float_dtype
from npattn._typing import Array, Pullback
from npattn.kernels.pointwise import implementation


def gelu(x: Array, approximate: str = "none") -> Array:
    """Gaussian error linear unit, ``x Φ(x)`` with Φ the normal distribution function.

    Parameters
    ----------
    x : float ndarray
        Any shape.
    approximate : {"none", "tanh"}
        "none" is exact; "tanh" is ``x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2``, as GPT-2 has it, at most
        5e-4 away.

    Returns
    -------
    y : ndarray
        Shape and dtype of x.

    Raises
    ------
    ValueError
        When ``approximate`` is anything else.

    References
    ----------
    Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv:1606.08415.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import gelu
    >>> gelu(np.array([-1.0, 0.0, 1.0])).round(4)
    array([-0.1587,  0.    ,  0.8413])
    """
    tanh = is_tanh(approximate)
    float_dtype("x", x.dtype)
    flat = _flat(x)
    return implementation(flat).gelu(flat, tanh).reshape(x.shape)  # type: ignore[no-any-return]


def gelu_vjp(x: Array, approximate: str = "none") -> tuple[Array, Pullback]:
    """``gelu`` and its pullback dy -> dx. Keeps x, nothing else.

    Parameters
    ----------
    x : float ndarray
    approximate : {"none", "tanh"}
        As in ``gelu``.

    Returns
    -------
    y : ndarray, shape of x
    pullback : callable
        ``pullback(dy) -> dx``, both of the shape of x.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import gelu_vjp
    >>> y, pullback = gelu_vjp(np.zeros(2))
    >>> pullback(np.array([1.0, 3.0])).tolist()  # the slope at 0 is one half
    [0.5, 1.5]
    """
    tanh = is_tanh(approximate)

    return gelu(x, approximate), lambda dy: _gelu_backward(dy, x, tanh)


def _gelu_backward(dy: Array, x: Array, tanh: bool) -> Array:
    flat, dflat = _flat(x), _flat(dy)
    return implementation(flat, dflat).gelu_backward(dflat, flat, tanh).reshape(x.shape)  # type: ignore[no-any-return]


def silu(x: Array) -> Array:
    """Sigmoid linear unit, ``x / (1 + exp(−x))``, also called swish.

    Parameters
    ----------
    x : float ndarray
        Any shape.

    Returns
    -------
    y : ndarray
        Shape and dtype of x. Never overflows.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import silu
    >>> silu(np.array([-1.0, 0.0, 1.0])).round(4)
    array([-0.2689,  0.    ,  0.7311])
    """
    float_dtype("x", x.dtype)
    flat = _flat(x)
    return implementation(flat).silu(flat).reshape(x.shape)  # type: ignore[no-any-return]


def silu_vjp(x: Array) -> tuple[Array, Pullback]:
    """``silu`` and its pullback dy -> dx. Keeps x, nothing else.

    Parameters
    ----------
    x : float ndarray
        As in ``silu``.

    Returns
    -------
    y : ndarray, shape of x
    pullback : callable
        ``pullback(dy) -> dx``, both of the shape of x.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import silu_vjp
    >>> y, pullback = silu_vjp(np.zeros(2))
    >>> pullback(np.array([1.0, 3.0])).tolist()  # the slope at 0 is one half
    [0.5, 1.5]
    """
    return silu(x), lambda dy: _silu_backward(dy, x)


def _silu_backward(dy: Array, x: Array) -> Array:
    flat, dflat = _flat(x), _flat(dy)
    return implementation(flat, dflat).silu_backward(dflat, flat).reshape(x.shape)  # type: ignore[no-any-return]


def swiglu(gate: Array, up: Array) -> Array:
    """The gated product ``silu(gate) · up`` of a SwiGLU feed-forward layer, in one pass.

    Parameters
    ----------
    gate, up : float ndarrays of one shape

    Returns
    -------
    y : ndarray

    References
    ----------
    Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import swiglu
    >>> swiglu(np.array([0.0, 1.0]), np.array([5.0, 2.0])).round(4)
    array([0.    , 1.4621])
    """
    float_dtype("gate", gate.dtype)
    float_dtype("up", up.dtype)
    g, u = _flat(gate), _flat(up)
    return implementation(g, u).swiglu(g, u).reshape(gate.shape)  # type: ignore[no-any-return]


def swiglu_vjp(gate: Array, up: Array) -> tuple[Array, Pullback]:
    """``swiglu`` and its pullback dy -> (dgate, dup). Keeps gate and up.

    Parameters
    ----------
    gate, up : float ndarray
        As in ``swiglu``.

    Returns
    -------
    y : ndarray, shape of gate
    pullback : callable
        ``pullback(dy) -> (dgate, dup)``.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.functional import swiglu_vjp
    >>> y, pullback = swiglu_vjp(np.zeros(1), np.full(1, 8.0))
    >>> dgate, dup = pullback(np.ones(1))
    >>> y.tolist(), dgate.tolist(), dup.tolist()
    ([0.0], [4.0], [0.0])
    """

    def pullback(dy: Array) -> tuple[Array, Array]:
        g, u, dflat = _flat(gate), _flat(up), _flat(dy)
        dgate, dup = implementation(g, u, dflat).swiglu_backward(dflat, g, u)
        return dgate.reshape(gate.shape), dup.reshape(up.shape)

    return swiglu(gate, up), pullback


def is_tanh(approximate: str) -> bool:
    """Which of the two GELUs a name means."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate must be "none" (exact) or "tanh", got {approximate!r}')
    return approximate == "tanh"


def _flat(x: Array) -> Array:
    return array_module(x).ascontiguousarray(x).reshape(-1)  # type: ignore[no-any-return]


#: Activations by name, as layers take them: x -> y, and (dy, x) -> dx.
ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]] = {
    "gelu": (gelu, lambda dy, x: _gelu_backward(dy, x, False)),
    "gelu_tanh": (lambda x: gelu(x, "tanh"), lambda dy, x: _gelu_backward(dy, x, True)),
    "silu": (silu, _silu_backward),
}

__all__ = ["gelu", "gelu_vjp", "silu", "silu_vjp", "swiglu", "swiglu_vjp"]
