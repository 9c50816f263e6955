"""LayerNorm and RMSNorm."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn import functional as F
from npattn._typing import Array, Grads, Pullback
from npattn.nn.init import parameter_dtype
from npattn.nn.layer import Layer


@dataclass(init=False, eq=False, repr=False)
class LayerNorm(Layer):
    """``(x − mean) / sqrt(var + eps) · weight + bias`` over the last axis.

    Parameters
    ----------
    dim : int
    eps : float, default 1e-5
    bias : bool, default True
        False: scale only.
    dtype : default float32

    Attributes
    ----------
    weight : ndarray, shape (dim,), initially 1
    bias : ndarray, shape (dim,), initially 0, or None

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> nn.LayerNorm(2, eps=0.0, dtype=np.float64)(np.array([1.0, 3.0]))
    array([-1.,  1.])
    """

    weight: Array
    bias: Array | None
    eps: float

    def __init__(self, dim: int, *, eps: float = 1e-5, bias: bool = True, dtype: Any = np.float32) -> None:
        self.weight = np.ones(dim, parameter_dtype(dtype))
        self.bias = np.zeros(dim, self.weight.dtype) if bias else None
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Shape and dtype of x, (..., dim)."""
        return F.layer_norm(x, self.weight, self.bias, eps=self.eps)

    def vjp(self, x: Array) -> tuple[Array, Pullback]:
        """Output and pullback."""
        y, back = F.layer_norm_vjp(x, self.weight, self.bias, eps=self.eps)

        def pullback(dy: Array) -> tuple[Array, Grads]:
            dx, dweight, dbias = back(dy)
            return dx, {"weight": dweight} if dbias is None else {"weight": dweight, "bias": dbias}

        return y, pullback


@dataclass(init=False, eq=False, repr=False)
class RMSNorm(Layer):
    """``x / sqrt(mean(x²) + eps) · weight`` over the last axis.

    Parameters
    ----------
    dim : int
    eps : float, default 1e-6
    dtype : default float32

    Attributes
    ----------
    weight : ndarray, shape (dim,), initially 1

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> nn.RMSNorm(2, eps=0.0, dtype=np.float64)(np.array([1.0, 7.0]))
    array([0.2, 1.4])
    """

    weight: Array
    eps: float

    def __init__(self, dim: int, *, eps: float = 1e-6, dtype: Any = np.float32) -> None:
        self.weight = np.ones(dim, parameter_dtype(dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Shape and dtype of x, (..., dim)."""
        return F.rms_norm(x, self.weight, eps=self.eps)

    def vjp(self, x: Array) -> tuple[Array, Pullback]:
        """Output and pullback."""
        y, back = F.rms_norm_vjp(x, self.weight, eps=self.eps)

        def pullback(dy: Array) -> tuple[Array, Grads]:
            dx, dweight = back(dy)
            return dx, {"weight": dweight}

        return y, pullback


__all__ = ["LayerNorm", "RMSNorm"]
