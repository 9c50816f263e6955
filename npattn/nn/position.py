"""Where a token stands: SinusoidalPosition, LearnedPosition (added), Rotary (rotates), ALiBi (a bias).

Positions are integers, (length,) or (batch, length); None means 0 … length − 1. Giving them explicitly is
what makes decoding, left padding and evicted keys come out right.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from npattn import _check
from npattn import functional as F
from npattn._arrays import array_module
from npattn._typing import Array, Grads, Pullback
from npattn.functional._products import sum_rows
from npattn.functional.embedding import check_ids
from npattn.nn.activation import without_parameters
from npattn.nn.init import generator, normal
from npattn.nn.layer import Layer

#: Angles of at most this many explicit positions are kept from call to call.
FEW_POSITIONS = 64


@dataclass(init=False, eq=False, repr=False)
class SinusoidalPosition(Layer):
    """Adds fixed sines and cosines.

    Feature 2i of position p gets ``sin(p / 10000^(2i / dim))``, feature 2i + 1 the cosine.

    Parameters
    ----------
    dim : int
    max_length : int, default 10000
        Positions from here on are refused.
    dtype : ignored
        The output has the input's dtype.

    Raises
    ------
    ValueError
        On call: a position of max_length or more, or below 0.

    References
    ----------
    Vaswani et al., Attention Is All You Need, section 3.5.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> nn.SinusoidalPosition(4)(np.zeros((2, 4))).round(4)
    array([[0.    , 1.    , 0.    , 1.    ],
           [0.8415, 0.5403, 0.01  , 1.    ]])
    """

    dim: int
    max_length: int

    def __init__(self, dim: int, max_length: int = 10000, *, dtype: Any = np.float32) -> None:
        self.dim = dim
        self.max_length = max_length

    def __call__(self, x: Array, positions: Any = None) -> Array:
        """``x + encoding(positions)``, x (..., length, dim)."""
        return x + self._encoding(x, positions)

    def vjp(self, x: Array, positions: Any = None) -> tuple[Array, Pullback]:
        """Output and pullback dy -> (dy, {})."""
        return self(x, positions), lambda dy: (dy, {})

    def encoding(self, positions: Any) -> Array:
        """The encoding itself, float64, positions.shape + (dim,)."""
        positions = check_ids(positions, self.max_length, "positions")
        xp = array_module(positions)
        angles = positions[..., None] * xp.asarray(10000.0 ** (-np.arange(0, self.dim, 2) / self.dim))
        table = xp.empty((*positions.shape, self.dim))
        table[..., 0::2] = xp.sin(angles)
        table[..., 1::2] = xp.cos(angles[..., : self.dim // 2])
        return table  # type: ignore[no-any-return]

    def _encoding(self, x: Array, positions: Any) -> Array:
        _check.float_dtype("x", x.dtype)
        if positions is None:
            check_length(x.shape[-2], self.max_length)
            table = _sinusoidal_table(x.shape[-2], self.dim, x.dtype)
            return array_module(x).asarray(table)  # type: ignore[no-any-return]
        xp = array_module(x)
        return xp.asarray(self.encoding(positions).astype(x.dtype))  # type: ignore[no-any-return]


@dataclass(init=False, eq=False, repr=False)
class LearnedPosition(Layer):
    """Adds one learned vector for each position.

    Parameters
    ----------
    max_length, dim : int
    rng : numpy Generator
    dtype : default float32
    std : float, default 0.02
        Deviation of the initial values.

    Attributes
    ----------
    weight : ndarray, shape (max_length, dim)

    Raises
    ------
    ValueError
        On call: more positions than max_length.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> layer = nn.LearnedPosition(16, 4, rng=np.random.default_rng(0))
    >>> layer(np.zeros((3, 5, 4), np.float32)).shape
    (3, 5, 4)
    """

    weight: Array

    def __init__(
        self,
        max_length: int,
        dim: int,
        *,
        rng: np.random.Generator,
        dtype: Any = np.float32,
        std: float = 0.02,
    ) -> None:
        self.weight = normal(generator(rng), (max_length, dim), std, dtype)

    def __call__(self, x: Array, positions: Any = None) -> Array:
        """``x + weight[positions]``, x (..., length, dim)."""
        if positions is None:
            check_length(x.shape[-2], self.weight.shape[0])
            return x + self.weight[: x.shape[-2]]
        check_ids(positions, self.weight.shape[0], "positions")
        return x + F.embedding(positions, self.weight)

    def vjp(self, x: Array, positions: Any = None) -> tuple[Array, Pullback]:
        """Output and pullback dy -> (dy, grads)."""
        weight, length = self.weight, x.shape[-2]

        def pullback(dy: Array) -> tuple[Array, Grads]:
            if positions is None:
                dweight = array_module(dy, weight).zeros_like(weight)
                dweight[:length] = sum_rows(dy.reshape(-1, length, weight.shape[1]))
            else:
                steps = np.broadcast_shapes(positions.shape, dy.shape[:-1])
                places = array_module(positions).broadcast_to(positions, steps)
                dweight = F.embedding_vjp(places, weight)[1](dy)
            return dy, {"weight": dweight}

        if positions is not None:
            positions = check_ids(positions, weight.shape[0], "positions")
        return self(x, positions), pullback


@dataclass(init=False, eq=False, repr=False)
class Rotary(Layer):
    """Rotates feature pairs of queries and keys by angles that grow with the position.

    Pair p turns by ``position · base^(−2p / rotary_dim)``, so a query's product with a key depends on how far
    apart they stand, not on where.

    Parameters
    ----------
    head_dim : int
    base : float, default 10000.0
    interleaved : bool, default False
        False pairs feature p with p + rotary_dim / 2, True with its neighbour (``npattn.functional.rotary``).
    rotary_dim : int, optional
        How many features turn (the first ones); None: all.
    scaling : mapping, optional
        As ``rope_scaling`` in a Hugging Face config. ``{"rope_type": "linear", "factor": f}`` divides
        positions by f; ``{"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor",
        "original_max_position_embeddings"}`` slows the low frequencies only.
    dtype : ignored
        The output has the input's dtype; angles are computed in float64.

    Raises
    ------
    ValueError
        When rotary_dim is odd or beyond head_dim, or the scaling is of another type or lacks a value.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import nn
    >>> rotary = nn.Rotary(2)
    >>> rotary(np.array([[1.0, 0.0], [1.0, 0.0]])).round(4)
    array([[1.    , 0.    ],
           [0.5403, 0.8415]])
    """

    head_dim: int
    base: float
    interleaved: bool
    rotary_dim: int
    scaling: Mapping[str, Any] | None

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        scaling: Mapping[str, Any] | None = None,
        dtype: Any = np.float32,
    ) -> None:
        self.head_dim = head_dim
        self.base = float(base)
        self.interleaved = interleaved
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if not isinstance(scaling, Mapping | None):
            raise TypeError(f"scaling must be a dict such as config.json's rope_scaling, got {scaling!r}")
        self.scaling = None if scaling is None else dict(scaling)
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= head_dim:
            raise ValueError(
                f"rotary_dim must be even and at most head_dim, since features turn in pairs: "
                f"rotary_dim {self.rotary_dim}, head_dim {head_dim}"
            )
        self.frequencies()  # a wrong scaling is refused here, not at the first call

    def __call__(self, x: Array, positions: Any = None) -> Array:
        """Rotated x (..., heads, length, head_dim)."""
        return F.rotary(x, *self.angles(x, positions), interleaved=self.interleaved)

    def vjp(self, x: Array, positions: Any = None) -> tuple[Array, Pullback]:
        """Output and pullback dy -> (dx, {}): the rotation back."""
        cos, sin = self.angles(x, positions)
        return without_parameters(F.rotary_vjp(x, cos, sin, interleaved=self.interleaved))

    def frequencies(self) -> Array:
        """Radians per position of each pair, float64, (rotary_dim / 2,)."""
        frequencies = self.base ** (-np.arange(0, self.rotary_dim, 2) / max(self.rotary_dim, 1))
        return _scaled(frequencies, self.scaling)

    def angles(self, x: Array, positions: Any = None) -> tuple[Array, Array]:
        """Cosine and sine for each row of x, in a shape that broadcasts against its heads."""
        length = x.shape[-2]
        xp = array_module(x)
        if positions is None:
            scaling = None if self.scaling is None else tuple(self.scaling.items())
            cos, sin = _rotary_table(length, self.rotary_dim, self.base, scaling, x.dtype == np.float64)
            return xp.asarray(cos), xp.asarray(sin)
        positions = xp.asarray(positions)
        if positions.dtype.kind not in "iu":
            raise TypeError(f"positions must be integers, got dtype {positions.dtype}")
        if positions.ndim not in (1, 2) or positions.shape[-1] not in (1, length):
            raise ValueError(
                f"positions must be (length,) or (batch, length): x {x.shape} has length {length}, "
                f"positions {positions.shape}"
            )
        double = x.dtype == np.float64
        if xp is np and positions.size <= FEW_POSITIONS:
            scaling = None if self.scaling is None else tuple(self.scaling.items())
            where = (positions.astype(np.int64).tobytes(), positions.shape)
            return _rotary_angles(*where, self.rotary_dim, self.base, scaling, double)
        return self._angles(positions, double)

    def _angles(self, positions: Array, double: bool) -> tuple[Array, Array]:
        xp = array_module(positions)
        angles = positions[..., None] * xp.asarray(self.frequencies())
        if positions.ndim == 2:
            angles = angles[:, None]  # the heads axis
        dtype = np.float64 if double else np.float32
        return xp.cos(angles).astype(dtype), xp.sin(angles).astype(dtype)


@dataclass(init=False, eq=False, repr=False)
class ALiBi(Layer):
    """Attention with linear biases: each head subtracts its slope times the distance from the logits.

    Parameters
    ----------
    num_heads : int
        Any number. A power of two gives slopes 2^(−8/n), 2^(−16/n), …; other numbers take those of the power
        below, then every second one of the power above, as in Press et al.'s published code.
    dtype : default float32
        Of slopes and bias.

    Attributes
    ----------
    slopes : ndarray, shape (num_heads,)
        Constants, not parameters.

    References
    ----------
    Press, Smith and Lewis, Train Short, Test Long, arXiv:2108.12409, section 3.

    Examples
    --------
    >>> from npattn import nn
    >>> nn.ALiBi(8).slopes[:3].tolist()
    [0.5, 0.25, 0.125]
    >>> nn.ALiBi(1)(2, 3).tolist()[0][1] == [-2 * 2.0**-8, -(2.0**-8), 0.0]
    True
    """

    num_heads: int
    dtype: Any

    def __init__(self, num_heads: int, *, dtype: Any = np.float32) -> None:
        self.num_heads = num_heads
        self.dtype = np.dtype(dtype)

    @property
    def slopes(self) -> Array:
        """(num_heads,)."""
        below = 1 << max(self.num_heads.bit_length() - 1, 0)
        slopes = _power_of_two_slopes(below) + _power_of_two_slopes(2 * below)[::2][: self.num_heads - below]
        return np.array(slopes[: self.num_heads], self.dtype)

    def __call__(self, len_q: int, len_k: int, offset: Any = None) -> Array:
        """The bias ``−slope · |i + offset − j|``.

        Parameters
        ----------
        len_q, len_k : int
        offset : int, or ndarray of shape (batch,), optional
            Query i stands at key position i + offset. None: len_k − len_q, the last query at the last key.

        Returns
        -------
        bias : ndarray, shape (num_heads, len_q, len_k), or (batch, num_heads, len_q, len_k)
        """
        start = np.asarray(len_k - len_q if offset is None else offset)
        return self.between(start[..., None] + np.arange(len_q), np.arange(len_k))

    def between(self, query_positions: Array, key_positions: Array) -> Array:
        """The bias for explicit positions (..., len_q) and (..., len_k): (..., num_heads, len_q, len_k)."""
        xp = array_module(query_positions, key_positions)
        distance = xp.abs(query_positions[..., :, None] - key_positions[..., None, :])
        slopes = xp.asarray(self.slopes)[:, None, None]
        return distance[..., None, :, :].astype(self.dtype) * -slopes  # type: ignore[no-any-return]


def check_length(length: int, max_length: int) -> None:
    """Refuse sequences longer than there are positions."""
    if length > max_length:
        raise ValueError(f"the sequence has {length} positions, but there are only {max_length} (max_length)")


@lru_cache(maxsize=32)
def _sinusoidal_table(length: int, dim: int, dtype: Any) -> Array:
    table = SinusoidalPosition(dim, max(length, 1)).encoding(np.arange(length)).astype(dtype)
    table.setflags(write=False)
    return table


@lru_cache(maxsize=32)
def _rotary_table(
    length: int, rotary_dim: int, base: float, scaling: Any, double: bool
) -> tuple[Array, Array]:
    rotary = Rotary(rotary_dim, base=base, scaling=None if scaling is None else dict(scaling))
    like = np.empty((length, rotary_dim), np.float64 if double else np.float32)
    cos, sin = rotary.angles(like, np.arange(length))
    cos.setflags(write=False)
    sin.setflags(write=False)
    return cos, sin


@lru_cache(maxsize=16)
def _rotary_angles(
    positions: bytes, shape: tuple[int, ...], rotary_dim: int, base: float, scaling: Any, double: bool
) -> tuple[Array, Array]:
    """The angles of a few positions: all layers of a decoding step ask for the same ones, twice each."""
    rotary = Rotary(rotary_dim, base=base, scaling=None if scaling is None else dict(scaling))
    cos, sin = rotary._angles(np.frombuffer(positions, np.int64).reshape(shape), double)
    cos.setflags(write=False)
    sin.setflags(write=False)
    return cos, sin


def _scaled(frequencies: Array, scaling: Mapping[str, Any] | None) -> Array:
    if scaling is None:
        return frequencies
    kind = scaling.get("rope_type", scaling.get("type"))
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }.get(kind)
    if needed is None:
        raise ValueError(f'rotary scaling must be of type "linear" or "llama3", got {kind!r}')
    missing = [name for name in needed if name not in scaling]
    if missing:
        raise ValueError(f"rotary scaling {kind!r} needs {', '.join(missing)}")
    given = [_check.number(f"rotary scaling's {name}", scaling[name]) for name in needed]
    if not all(0.0 < value < math.inf for value in given):
        raise ValueError(f"rotary scaling's {', '.join(needed)} must be positive and finite, got {given}")
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / given[0]
    factor, low, high, original = given
    if low >= high:
        raise ValueError(f"rotary scaling's low_freq_factor {low} must be below high_freq_factor {high}")
    # How often a pair turns within the original context: often (kept), seldom (slowed), between (mixed).
    turns = original * frequencies / (2.0 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / factor


def _power_of_two_slopes(heads: int) -> list[float]:
    return [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]


__all__ = ["ALiBi", "LearnedPosition", "Rotary", "SinusoidalPosition", "check_length"]
