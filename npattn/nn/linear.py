"""Linear: the matmul of every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn import functional as F
from npattn._typing import Array, Grads, Pullback
from npattn.functional.linear import linears, linears_vjp
from npattn.nn.init import fan_in_uniform, generator
from npattn.nn.layer import Layer


@dataclass(init=False, eq=False, repr=False)
class Linear(Layer):
    """``y = x · weightᵀ + bias``.

    Parameters
    ----------
    in_dim, out_dim : int
    bias : bool, default True
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    weight : ndarray, shape (out_dim, in_dim)
        PyTorch's orientation. Initially uniform in ±1/√in_dim, as there.
    bias : ndarray, shape (out_dim,), or None

    Raises
    ------
    ValueError
        On call, when the last axis of x is not in_dim.

    Notes
    -----
    All leading axes of x are taken as rows of one matmul. The pullback keeps x.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> layer = nn.Linear(4, 3, rng=np.random.default_rng(0))
    >>> layer(np.zeros((2, 5, 4), np.float32)).shape
    (2, 5, 3)
    """

    weight: Array
    bias: Array | None

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        bias: bool = True,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        rng = generator(rng)
        if in_dim < 1 or out_dim < 1:
            raise ValueError(f"in_dim and out_dim must be at least 1, got {in_dim} and {out_dim}")
        self.weight = fan_in_uniform(rng, (out_dim, in_dim), in_dim, dtype)
        self.bias = fan_in_uniform(rng, (out_dim,), in_dim, dtype) if bias else None

    def __call__(self, x: Array, *, added: Array | None = None) -> Array:
        """``y (..., out_dim)`` of ``x (..., in_dim)``, plus ``added``."""
        self.check(x)
        return F.linear(x, self.weight, self.bias, added=added)

    def vjp(self, x: Array, *, added: Array | None = None) -> tuple[Array, Pullback]:
        """Output and pullback; ``dx = dy · weight``, ``dweight = dyᵀ · x``, ``dbias = Σ dy``."""
        self.check(x)
        y, back = F.linear_vjp(x, self.weight, self.bias, added=added)

        def pullback(dy: Array) -> tuple[Array, Grads]:
            dx, dweight, dbias = back(dy)
            return dx, named(dweight, dbias)

        return y, pullback

    def check(self, x: Array) -> None:
        """Raise ValueError unless the last axis of x is in_dim."""
        out_dim, in_dim = self.weight.shape
        if x.ndim == 0 or x.shape[-1] != in_dim:
            raise ValueError(
                f"Linear({in_dim}, {out_dim}) needs x of shape (..., {in_dim}), got {x.shape}: "
                "the last axis is the features"
            )


def together(layers: Sequence[Linear], x: Array) -> list[Array]:
    """``layer(x)`` of several layers for one x, as one call."""
    for layer in layers:
        layer.check(x)
    return linears(x, [(layer.weight, layer.bias) for layer in layers])


def together_vjp(layers: Sequence[Linear], x: Array) -> tuple[list[Array], Pullback]:
    """``together`` and its pullback dys -> (dx, [grads of each layer])."""
    for layer in layers:
        layer.check(x)
    ys, back = linears_vjp(x, [(layer.weight, layer.bias) for layer in layers])

    def pullback(dys: Sequence[Array]) -> tuple[Array, list[Grads]]:
        dx, dmaps = back(dys)
        return dx, [named(*dmap) for dmap in dmaps]

    return ys, pullback


def named(dweight: Array, dbias: Array | None) -> Grads:
    """The gradients of a Linear by name."""
    return {"weight": dweight} if dbias is None else {"weight": dweight, "bias": dbias}


__all__ = ["Linear", "named", "together", "together_vjp"]
