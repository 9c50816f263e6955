"""Embedding: one learned vector for each id."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn import functional as F
from npattn._typing import Array, Grads, Pullback
from npattn.nn.init import generator, normal
from npattn.nn.layer import Layer


@dataclass(init=False, eq=False, repr=False)
class Embedding(Layer):
    """``y = weight[ids]``.

    Parameters
    ----------
    num, dim : int
        How many ids there are, and the length of each one's vector.
    rng : numpy Generator
    dtype : default float32
    std : float, default 1.0
        Deviation of the normal initial values (PyTorch's is 1, GPT-2's 0.02).

    Attributes
    ----------
    weight : ndarray, shape (num, dim)

    Raises
    ------
    TypeError, ValueError
        On call: ids that are not integers, or not in [0, num).

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> layer = nn.Embedding(10, 4, rng=np.random.default_rng(0))
    >>> layer(np.array([[3, 1, 9]])).shape
    (1, 3, 4)
    """

    weight: Array

    def __init__(
        self, num: int, dim: int, *, rng: np.random.Generator, dtype: Any = np.float32, std: float = 1.0
    ) -> None:
        self.weight = normal(generator(rng), (num, dim), std, dtype)

    def __call__(self, ids: Any) -> Array:
        """(..., dim) of integer ids (...)."""
        return F.embedding(ids, self.weight)

    def vjp(self, ids: Any) -> tuple[Array, Pullback]:
        """Output and pullback dy -> (None, grads): ids have no gradient."""
        y, back = F.embedding_vjp(ids, self.weight)

        def pullback(dy: Array) -> tuple[None, Grads]:
            return None, {"weight": back(dy)}

        return y, pullback


__all__ = ["Embedding"]
