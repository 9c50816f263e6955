"""The dropout generator: a counter-based hash, so that a mask depends on (seed, b, h, i, j) and nothing else.

No state, no order: a tile, a thread, a shard or a GPU computes the bits of just the weights it holds. All
arithmetic is on unsigned 32-bit words, modulo 2**32::

    mix(x):     x ^= x >> 16;  x *= 0x21f0aaad;  x ^= x >> 15;  x *= 0xd35a2d97;  x ^= x >> 15
    fold(s, w): mix(s ^ (w * 0x9e3779b1))

    r0 = fold(fold(fold(fold(fold(0x243f6a88, seed_lo), seed_hi), b), h), i)
    r1 = fold(fold(fold(fold(fold(0x85a308d3, seed_lo), seed_hi), b), h), i)
    x  = mix(fold(r0, j) ^ r1)
    kept  iff  x >= min(round(p * 2**32), 2**32 - 1)

``mix`` is the 32-bit finaliser with two multiplications and the lowest bias found by exhaustive search
(C. Wellons, hash-prospector, 2018). The row words r0 and r1 are computed once per query; each weight costs
two mixes, which vectorise on every machine.
"""

import operator
from typing import Any, Final

import numpy as np

from npattn._arrays import array_module
from npattn._typing import Array

R0: Final = 0x243F6A88
R1: Final = 0x85A308D3
GOLDEN: Final = 0x9E3779B1
MIX_1: Final = 0x21F0AAAD
MIX_2: Final = 0xD35A2D97


def keep_mask(seed: int, shape_or_indices: tuple[Any, ...], p: float) -> Array:
    """Which attention weights survive dropout with probability ``p``.

    Parameters
    ----------
    seed : int
        Taken modulo 2**64.
    shape_or_indices : tuple
        Either the shape ``(batch, heads, len_q, len_k)`` as ints, or fewer of them, counted from the right
        (the missing leading ones are 1); or four integer arrays ``(b, h, i, j)`` that broadcast against each
        other, for the weights at just those places.
    p : float
        Probability of dropping, in [0, 1].

    Returns
    -------
    keep : bool ndarray
        Of the given shape, or of the broadcast shape of the indices. True means kept. Dropout multiplies
        kept weights by ``1 / (1 - p)``.

    Raises
    ------
    ValueError
        When p is outside [0, 1], or more than four axes are asked for.

    Notes
    -----
    The same on every backend, tile size and thread count. Indices are taken modulo 2**32; the probability is
    exact to 2**-32.

    Examples
    --------
    >>> from npattn.functional.dropout import keep_mask
    >>> keep = keep_mask(7, (2, 3, 64, 64), 0.25)
    >>> keep.shape, round(float(keep.mean()), 2)
    ((2, 3, 64, 64), 0.75)
    >>> one = keep_mask(7, (np.array(1), np.array(2), np.array(10), np.array(20)), 0.25)
    >>> bool(one == keep[1, 2, 10, 20])
    True
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p must be in [0, 1], got {p}")
    seed = operator.index(seed)
    sizes = tuple(shape_or_indices)
    if len(sizes) > 4:
        raise ValueError(f"at most four axes (batch, heads, len_q, len_k), got {len(sizes)}")
    is_shape = all(isinstance(size, int | np.integer) for size in sizes)
    if is_shape:
        xp = np
        sizes = tuple(int(size) for size in sizes)
        indices: Any = np.ogrid[tuple(slice(size) for size in (1,) * (4 - len(sizes)) + sizes)]
    elif len(sizes) == 4:
        xp = array_module(*sizes)
        indices = sizes
    else:
        raise ValueError(
            f"indices are four arrays (b, h, i, j), got {len(sizes)}; a shape is a tuple of ints"
        )
    b, h, i, j = (xp.asarray(index).astype(xp.uint32) for index in indices)
    with np.errstate(over="ignore"):  # 0-d results are NumPy scalars, which warn where arrays wrap silently
        x = _mix(_fold(_row_word(R0, seed, b, h, i), j) ^ _row_word(R1, seed, b, h, i))
    keep: Array = x >= xp.uint32(threshold(p)) if p < 1.0 else xp.zeros(x.shape, bool)
    return keep.reshape(sizes) if is_shape else keep


def threshold(p: float) -> int:
    """The smallest 32-bit word that is kept: ``x`` is kept iff ``x >= threshold(p)``, for p < 1."""
    return min(round(p * 2.0**32), 2**32 - 1)


def fold_seed(seed: int, index: int) -> int:
    """A seed of its own for the ``index``-th place of a model where dropout happens.

    Parameters
    ----------
    seed : int
        Taken modulo 2**64.
    index : int
        Which place.

    Returns
    -------
    seed : int
        In [0, 2**64).

    Examples
    --------
    >>> from npattn.functional import fold_seed
    >>> fold_seed(1, 0) != fold_seed(1, 1) != fold_seed(2, 1)
    True
    """
    word = np.asarray([index], np.uint32)
    lo, hi = (int(_row_word(start, seed, word, word, word)[0]) for start in (R0, R1))
    return hi << 32 | lo


def _mix(x: Array) -> Array:
    x = x ^ (x >> 16)
    x = x * np.uint32(MIX_1)
    x = x ^ (x >> 15)
    x = x * np.uint32(MIX_2)
    x = x ^ (x >> 15)
    return x


def _fold(state: Array, word: Array) -> Array:
    return _mix(state ^ (word * np.uint32(GOLDEN)))


def _row_word(start: int, seed: int, b: Array, h: Array, i: Array) -> Array:
    """r0 (start R0) or r1 (start R1) of the rows (b, h, i)."""
    state = np.full((1,) * b.ndim, start, np.uint32)
    for half in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF):
        state = _fold(state, np.full_like(state, half))
    if array_module(b) is not np:
        state = array_module(b).asarray(state)
    return _fold(_fold(_fold(state, b), h), i)
