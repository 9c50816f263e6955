"""Linear: the matmul of every layer."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn import functional as F
from npattn._typing import Array, Grads, Pullback
from npattn.functional._products import matmul, sum_rows
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
        self.weight = fan_in_uniform(rng, (out_dim, in_dim), in_dim, dtype)
        self.bias = fan_in_uniform(rng, (out_dim,), in_dim, dtype) if bias else None

    def __call__(self, x: Array) -> Array:
        """``y (..., out_dim)`` of ``x (..., in_dim)``."""
        self._check(x)
        return F.linear(x, self.weight, self.bias)

    def vjp(self, x: Array) -> tuple[Array, Pullback]:
        """Output and pullback; ``dx = dy · weight``, ``dweight = dyᵀ · x``, ``dbias = Σ dy``."""
        weight, has_bias = self.weight, self.bias is not None

        def pullback(dy: Array) -> tuple[Array, Grads]:
            rows = dy.reshape(-1, weight.shape[0])
            grads = {"weight": matmul(rows.T, x.reshape(-1, weight.shape[1]))}
            if has_bias:
                grads["bias"] = sum_rows(rows)
            return matmul(rows, weight).reshape(x.shape), grads

        return self(x), pullback

    def _check(self, x: Array) -> None:
        out_dim, in_dim = self.weight.shape
        if x.ndim == 0 or x.shape[-1] != in_dim:
            raise ValueError(
                f"Linear({in_dim}, {out_dim}) needs x of shape (..., {in_dim}), got {x.shape}: "
                "the last axis is the features"
            )


__all__ = ["Linear"]
