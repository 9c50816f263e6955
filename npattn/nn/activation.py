"""GELU, SiLU and Dropout: the layers without parameters. Their pullbacks give (dx, {})."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from npattn import functional as F
from npattn._typing import Array, Grads, Pullback
from npattn.functional.activation import is_tanh
from npattn.functional.dropout import dropout, dropout_vjp
from npattn.nn.layer import Layer


@dataclass(init=False, eq=False, repr=False)
class GELU(Layer):
    """Gaussian error linear unit.

    Parameters
    ----------
    approximate : {"none", "tanh"}
        See ``npattn.functional.gelu``.
    dtype : ignored
        The output has the input's dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> nn.GELU()(np.array([1.0])).round(4)
    array([0.8413])
    """

    approximate: str

    def __init__(self, approximate: str = "none", *, dtype: Any = np.float32) -> None:
        is_tanh(approximate)
        self.approximate = approximate

    def __call__(self, x: Array) -> Array:
        """Shape and dtype of x."""
        return F.gelu(x, self.approximate)

    def vjp(self, x: Array) -> tuple[Array, Pullback]:
        """Output and pullback dy -> (dx, {})."""
        return without_parameters(F.gelu_vjp(x, self.approximate))


@dataclass(init=False, eq=False, repr=False)
class SiLU(Layer):
    """Sigmoid linear unit, ``x σ(x)``.

    Parameters
    ----------
    dtype : ignored
        The output has the input's dtype.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> nn.SiLU()(np.array([1.0])).round(4)
    array([0.7311])
    """

    def __init__(self, *, dtype: Any = np.float32) -> None:
        pass

    def __call__(self, x: Array) -> Array:
        """Shape and dtype of x."""
        return F.silu(x)

    def vjp(self, x: Array) -> tuple[Array, Pullback]:
        """Output and pullback dy -> (dx, {})."""
        return without_parameters(F.silu_vjp(x))


@dataclass(init=False, eq=False, repr=False)
class Dropout(Layer):
    """Sets entries to 0 with probability p and divides the others by 1 − p, when given a seed.

    Parameters
    ----------
    p : float in [0, 1]
    dtype : ignored
        The output has the input's dtype.

    Raises
    ------
    ValueError
        When p is outside [0, 1].

    Notes
    -----
    ``layer(x)`` without a seed is evaluation: x itself comes back. The entries kept are
    ``npattn.functional.dropout.keep_mask(seed, x.shape, p)``.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> nn.Dropout(0.5)(np.ones(6), seed=3)
    array([0., 0., 2., 0., 0., 0.])
    """

    p: float
    takes_seed: ClassVar[bool] = True

    def __init__(self, p: float, *, dtype: Any = np.float32) -> None:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p must be in [0, 1], got {p}")
        self.p = float(p)

    def __call__(self, x: Array, seed: int | None = None) -> Array:
        """Shape and dtype of x; x itself when seed is None or p is 0."""
        return x if seed is None else dropout(x, self.p, seed)

    def vjp(self, x: Array, seed: int | None = None) -> tuple[Array, Pullback]:
        """Output and pullback dy -> (dx, {}): the same entries dropped."""
        if seed is None:
            return x, lambda dy: (dy, {})
        return without_parameters(dropout_vjp(x, self.p, seed))


def without_parameters(result: tuple[Array, Pullback]) -> tuple[Array, Pullback]:
    """(y, dy -> dx) as a layer has it: (y, dy -> (dx, {}))."""
    y, back = result

    def pullback(dy: Array) -> tuple[Array, Grads]:
        return back(dy), {}

    return y, pullback


__all__ = ["GELU", "Dropout", "SiLU", "without_parameters"]
