"""MLP and GatedMLP: the position-wise half of a transformer block."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn import functional as F
from npattn._typing import Array, Grads, Pullback
from npattn.functional.activation import ACTIVATIONS
from npattn.functional.linear import Map
from npattn.nn.init import generator
from npattn.nn.layer import Layer, join
from npattn.nn.linear import Linear, named, together, together_vjp


@dataclass(init=False, eq=False, repr=False)
class MLP(Layer):
    """``down(activation(up(x)))``.

    Parameters
    ----------
    dim, hidden_dim : int
    activation : {"gelu", "gelu_tanh", "silu"}
    bias : bool, default True
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    up : Linear(dim, hidden_dim)
    down : Linear(hidden_dim, dim)

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> layer = nn.MLP(4, 16, rng=np.random.default_rng(0))
    >>> list(layer.named_parameters())
    ['up.weight', 'up.bias', 'down.weight', 'down.bias']
    """

    up: Linear
    down: Linear
    activation: str

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        rng = generator(rng)
        self.up = Linear(dim, hidden_dim, bias=bias, rng=rng, dtype=dtype)
        self.down = Linear(hidden_dim, dim, bias=bias, rng=rng, dtype=dtype)
        self.activation = activation

    def __call__(self, x: Array, *, added: Array | None = None) -> Array:
        """(..., dim) of x (..., dim), plus ``added``."""
        self.up.check(x)
        return F.mlp(x, *self._maps(), self.activation, added=added)

    def vjp(self, x: Array, *, added: Array | None = None) -> tuple[Array, Pullback]:
        """Output and pullback."""
        self.up.check(x)
        y, back = F.mlp_vjp(x, *self._maps(), self.activation, added=added)

        def pullback(dy: Array) -> tuple[Array, Grads]:
            dx, up, down = back(dy)
            return dx, join(("up", named(*up)), ("down", named(*down)))

        return y, pullback

    def _maps(self) -> tuple[Map, Map]:
        return (self.up.weight, self.up.bias), (self.down.weight, self.down.bias)


@dataclass(init=False, eq=False, repr=False)
class GatedMLP(Layer):
    """``down(silu(gate(x)) · up(x))``: SwiGLU.

    Parameters
    ----------
    dim, hidden_dim : int
    bias : bool, default False
    rng : numpy Generator
    dtype : default float32

    Attributes
    ----------
    gate, up : Linear(dim, hidden_dim)
    down : Linear(hidden_dim, dim)

    References
    ----------
    Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, equation 6.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> layer = nn.GatedMLP(4, 16, rng=np.random.default_rng(0))
    >>> list(layer.named_parameters())
    ['gate.weight', 'up.weight', 'down.weight']
    """

    gate: Linear
    up: Linear
    down: Linear

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        bias: bool = False,
        rng: np.random.Generator,
        dtype: Any = np.float32,
    ) -> None:
        rng = generator(rng)
        self.gate = Linear(dim, hidden_dim, bias=bias, rng=rng, dtype=dtype)
        self.up = Linear(dim, hidden_dim, bias=bias, rng=rng, dtype=dtype)
        self.down = Linear(hidden_dim, dim, bias=bias, rng=rng, dtype=dtype)

    def __call__(self, x: Array, *, added: Array | None = None) -> Array:
        """(..., dim) of x (..., dim), plus ``added``."""
        return self.down(F.swiglu(*together((self.gate, self.up), x)), added=added)

    def vjp(self, x: Array, *, added: Array | None = None) -> tuple[Array, Pullback]:
        """Output and pullback."""
        (g, u), back_both = together_vjp((self.gate, self.up), x)
        a, back_product = F.swiglu_vjp(g, u)
        y, back_down = self.down.vjp(a, added=added)

        def pullback(dy: Array) -> tuple[Array, Grads]:
            da, down = back_down(dy)
            dx, (gate, up) = back_both(back_product(da))
            return dx, join(("gate", gate), ("up", up), ("down", down))

        return y, pullback


__all__ = ["MLP", "GatedMLP"]
