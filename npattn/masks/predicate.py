"""Predicate: any rule, as a function of indices."""

# ruff: noqa: D102 (what the overriding methods do is documented once, in Mask)

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from npattn._typing import Array
from npattn.masks.base import Extent, Mask


@dataclass(frozen=True, eq=False)
class Predicate(Mask):
    """Any rule at all: visible iff ``function(b, h, i, j)``.

    Parameters
    ----------
    function : callable
        Takes four int64 arrays (batch element, query head, query, key) that broadcast against each other and
        returns a bool array that broadcasts to their common shape, or True or False. It must work element by
        element: an axis missing in the result means that the answer does not depend on that index.
    cache : bool
        True promises that the function gives the same answers whenever it is asked, so that plans may be
        kept. Without that promise every call of attention asks it again: a function may close over arrays
        that change.

    Raises
    ------
    TypeError, ValueError
        When the result is not bool, or does not broadcast. What the function itself raises reaches the
        caller as it is.

    Notes
    -----
    Which tiles are visible is not known, so the function is asked about every pair, some two million at a
    time: time O(batch · heads · len_q · len_k) (without batch and heads where its result lacks them), memory
    O(tiles). Joined by ``&`` with another mask, only in the tiles that the other leaves open. Predicates are
    equal when their function is the same object.

    Examples
    --------
    >>> print(Predicate(lambda b, h, i, j: (i + j) % 3 == 0).picture(3, 6))
    █··█··
    ··█··█
    ·█··█·
    """

    function: Callable[[Array, Array, Array, Array], Any]
    cache: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"Predicate takes a function (b, h, i, j) -> bool, got {type(self.function).__name__}"
            )
        object.__setattr__(self, "cacheable", bool(self.cache))

    def _identity(self) -> tuple[Any, ...]:
        return _ByIdentity(self.function), self.cache

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        result = np.asarray(self.function(b, h, i, j))
        if result.dtype != np.bool_:
            raise TypeError(f"the function of a Predicate must return bool, got dtype {result.dtype}")
        shape = np.broadcast_shapes(b.shape, h.shape, i.shape, j.shape)
        try:
            fits = np.broadcast_shapes(result.shape, shape) == shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"the function of a Predicate returned shape {result.shape}, which does not broadcast to the "
                f"{shape} of its indices"
            )
        return result.reshape((1,) * (len(shape) - result.ndim) + result.shape)

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        if 0 in extent:
            return False, False
        b, h, i, j = np.ogrid[: extent.batch, : extent.heads, :1, :1]
        shape = self.allowed(extent, b, h, i, j).shape
        return shape[0] > 1, shape[1] > 1


class _ByIdentity:
    """Equal only when it is the same object, hashable whatever the object is."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


__all__ = ["Predicate"]
