"""Initial values of parameters, drawn in float64 and rounded: a seed means one model in every dtype."""

import math
from typing import Any

import numpy as np

from npattn import _check
from npattn._arrays import is_attention_dtype
from npattn._typing import Array


class Blank(np.random.Generator):
    """In place of an rng: every weight starts at 0, without drawing or touching memory.

    For layers whose weights are loaded right afterwards; pass ``rng=nn.init.BLANK``.
    """

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))


#: The one Blank there needs to be.
BLANK = Blank()


def generator(rng: Any) -> np.random.Generator:
    """``rng`` itself; a plain integer seeds a new one.

    Raises
    ------
    TypeError
        For anything else, None included: initial weights never come from a hidden global state.
    """
    if isinstance(rng, np.random.Generator):
        return rng
    if isinstance(rng, int | np.integer):
        return np.random.default_rng(int(rng))
    raise TypeError(f"rng must be a numpy Generator: rng=np.random.default_rng(0); got {type(rng).__name__}")


def parameter_dtype(dtype: Any) -> np.dtype[Any]:
    """``dtype`` as a dtype of parameters: one attention computes in."""
    found: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    if not is_attention_dtype(found):
        raise TypeError(f"the dtype of parameters must be {_check.FLOATS}, got {found}")
    return found


def normal(rng: np.random.Generator, shape: tuple[int, ...], std: float, dtype: Any) -> Array:
    """Normal with mean 0 and the given deviation.

    >>> import numpy as np
    >>> normal(np.random.default_rng(0), (2, 3), 0.02, np.float32).shape
    (2, 3)
    """
    dtype = parameter_dtype(dtype)
    if isinstance(rng, Blank):
        return np.zeros(shape, dtype)
    return (rng.standard_normal(shape) * std).astype(dtype)


def uniform(rng: np.random.Generator, shape: tuple[int, ...], bound: float, dtype: Any) -> Array:
    """Uniform in [−bound, bound)."""
    dtype = parameter_dtype(dtype)
    if isinstance(rng, Blank):
        return np.zeros(shape, dtype)
    return rng.uniform(-bound, bound, shape).astype(dtype)


def fan_in_uniform(rng: np.random.Generator, shape: tuple[int, ...], inputs: int, dtype: Any) -> Array:
    """Uniform in ±1/√inputs: PyTorch's default for the weight and the bias of a linear layer."""
    return uniform(rng, shape, 1.0 / math.sqrt(inputs) if inputs else 0.0, dtype)


def glorot_uniform(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Uniform in ±√(6 / sum of the last two axes) (Glorot and Bengio 2010, equation 16)."""
    return uniform(rng, shape, math.sqrt(6.0 / (shape[-1] + shape[-2])), dtype)


__all__ = [
    "BLANK",
    "Blank",
    "fan_in_uniform",
    "generator",
    "glorot_uniform",
    "normal",
    "parameter_dtype",
    "uniform",
]
