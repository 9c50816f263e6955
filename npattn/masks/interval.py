"""Masks under which each query sees one interval of keys: Full, Causal, Window, Padding, Documents, Prefix.

All of them, and their intersections, are planned in O(len_q) time and memory.

Alignment
---------
``offset`` places query i at key position i + offset. None means len_k − len_q, bottom-right: the last query
stands at the last key, as in decoding with a cache (flash-attention, MLX). 0 is top-left: the first query
stands at the first key (PyTorch's ``is_causal``, JAX). An array of shape (batch,) gives every batch element
its own. Offsets are not clamped: a very negative one leaves queries without any key.
"""

# ruff: noqa: D102 (what the overriding methods do is documented once, in Mask)

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from npattn._typing import Array
from npattn.masks._arguments import (
    FAR,
    check_batch,
    one_or_per_batch,
    per_batch,
    take,
    whole_number,
    whole_numbers,
)
from npattn.masks.base import Extent, Mask, as_intervals


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Every query sees every key.

    Notes
    -----
    No row is empty unless there are no keys. ``mask=None`` means the same.

    Examples
    --------
    >>> print(Full().picture(2, 3))
    ███
    ███
    """

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        return np.ones((1,) * max(b.ndim, h.ndim, i.ndim, j.ndim), bool)

    def intervals(self, extent: Extent) -> tuple[Array, Array]:
        lo = np.zeros((1, 1, extent.len_q), np.int64)
        return lo, lo + extent.len_k


class _Band(Mask):
    """Masks that see a band of diagonals: first <= j − i <= last."""

    offset: int | tuple[int, ...] | None

    def _ends(self, extent: Extent) -> tuple[Array, Array]:
        """First and last visible diagonal j − i, shape (batch or 1,)."""
        raise NotImplementedError

    def _offset(self, extent: Extent) -> int | tuple[int, ...]:
        return extent.len_k - extent.len_q if self.offset is None else self.offset

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        first, last = self._ends(extent)
        diagonal = j - i
        inside: Array = (diagonal >= take(first, b)) & (diagonal <= take(last, b))
        return inside

    def intervals(self, extent: Extent) -> tuple[Array, Array]:
        first, last = self._ends(extent)
        i = np.arange(extent.len_q)
        return as_intervals(i + first[:, None, None], i + last[:, None, None] + 1, extent.len_k)

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        return isinstance(self.offset, tuple), False

    def check(self, extent: Extent) -> None:
        check_batch(f"{type(self).__name__}'s offset", self.offset, extent)


@dataclass(frozen=True, eq=False)
class Causal(_Band):
    """A query sees the keys up to its own position: ``j <= i + offset``.

    Parameters
    ----------
    offset : int, array of shape (batch,), or None
        Where query 0 stands among the keys. None is len_k − len_q (bottom-right), 0 is top-left. A larger
        offset shows more keys.

    Notes
    -----
    Rows i < −offset see nothing: with None, the first len_q − len_k rows when there are more queries than
    keys.

    Examples
    --------
    Three queries, five keys; bottom-right and top-left:

    >>> print(Causal().picture(3, 5))
    ███··
    ████·
    █████
    >>> print(Causal(offset=0).picture(3, 5))
    █····
    ██···
    ███··

    More queries than keys: the first two rows are empty.

    >>> print(Causal().picture(4, 2))
    ··
    ··
    █·
    ██
    """

    offset: Any = None

    def __post_init__(self) -> None:
        if self.offset is not None:
            object.__setattr__(self, "offset", one_or_per_batch("offset", self.offset))

    def _ends(self, extent: Extent) -> tuple[Array, Array]:
        return np.array([-FAR]), per_batch(self._offset(extent))


@dataclass(frozen=True, eq=False)
class Window(_Band):
    """A query sees the keys near its own position: ``i+offset−left <= j <= i+offset+right``, both inclusive.

    Parameters
    ----------
    left, right : int >= 0 or None
        How many keys before and after the query's own position; None is unbounded. The own key counts in
        neither, so a window of W keys ending at the query is ``Window(W - 1)``.
    offset : int, array of shape (batch,), or None
        As in `Causal`.

    Notes
    -----
    Rows whose whole window lies before the first or behind the last key see nothing: with offset None and
    right = 0, the first len_q − len_k rows.

    Libraries differ: flash-attention's ``window_size=(left, right)`` is this one; Mistral's and Hugging
    Face's ``sliding_window=W`` is ``Window(W - 1)``.

    Examples
    --------
    >>> print(Window(2).picture(5, 5))
    █····
    ██···
    ███··
    ·███·
    ··███
    >>> print(Window(1, 1, offset=0).picture(5, 5))
    ██···
    ███··
    ·███·
    ··███
    ···██
    """

    left: int | None
    right: int | None = 0
    offset: Any = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(f"Window's {name}", getattr(self, name), least=0))
        if self.offset is not None:
            object.__setattr__(self, "offset", one_or_per_batch("offset", self.offset))

    def _ends(self, extent: Extent) -> tuple[Array, Array]:
        offset = self._offset(extent)
        first = np.array([-FAR]) if self.left is None else per_batch(offset, -self.left)
        last = np.array([FAR]) if self.right is None else per_batch(offset, self.right)
        return first, last


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Batch element b has key_lengths[b] real keys: ``j < key_lengths[b]`` and ``i < query_lengths[b]``.

    Parameters
    ----------
    key_lengths : array of shape (batch,), or int
        Number of real keys of each batch element; an int counts for all of them. More than len_k is len_k.
    query_lengths : array of shape (batch,), int, or None
        Number of real queries; None leaves all queries in.

    Notes
    -----
    Rows are empty when a batch element has no key, and behind query_lengths.

    Examples
    --------
    >>> mask = Padding([2, 3], query_lengths=[2, 1])
    >>> print(mask.picture(3, 4, batch=2))
    ██··
    ██··
    ····
    >>> print(mask.picture(3, 4, batch=2, b=1))
    ███·
    ····
    ····
    """

    key_lengths: Any
    query_lengths: Any = None

    def __post_init__(self) -> None:
        for name in ("key_lengths", "query_lengths"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, one_or_per_batch(f"Padding's {name}", value, least=0))
        entries = [len(value) for value in (self.key_lengths, self.query_lengths) if isinstance(value, tuple)]
        if len(set(entries)) > 1:
            raise ValueError(
                f"Padding's key_lengths and query_lengths must be of one batch, got "
                f"{entries[0]} and {entries[1]} entries"
            )

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        visible: Array = j < take(per_batch(self.key_lengths), b)
        if self.query_lengths is not None:
            visible = visible & (i < take(per_batch(self.query_lengths), b))
        return visible

    def intervals(self, extent: Extent) -> tuple[Array, Array]:
        i = np.arange(extent.len_q)
        hi = per_batch(self.key_lengths)[:, None, None] + np.zeros_like(i)
        if self.query_lengths is not None:
            hi = np.where(i < per_batch(self.query_lengths)[:, None, None], hi, 0)
        return as_intervals(np.zeros(1, np.int64), hi, extent.len_k)

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        return isinstance(self.key_lengths, tuple) or isinstance(self.query_lengths, tuple), False

    def check(self, extent: Extent) -> None:
        check_batch("Padding's key_lengths", self.key_lengths, extent)
        check_batch("Padding's query_lengths", self.query_lengths, extent)


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Packed sequences: a query sees the keys of its own segment.

    Parameters
    ----------
    query_lengths : sequence of int
        Length of each segment along the queries; their sum must be len_q. Zeros are fine.
    key_lengths : sequence of int or None
        The same along the keys, as many segments; None is query_lengths.
    causal : bool
        Inside a segment: only keys up to the query's own position.
    window : int, (left, right), or None
        Inside a segment: only keys near the query's own position. An int w is
        ``Window(w, 0 if causal else w)``; in a pair None is unbounded.

    Notes
    -----
    Inside a segment positions are aligned bottom-right: its last query stands at its last key. A segment
    with queries but no keys has empty rows; so have, with causal or window, the first rows of a segment
    with more queries than keys.

    Examples
    --------
    >>> print(Documents([2, 3], causal=True).picture(5, 5))
    █····
    ██···
    ··█··
    ··██·
    ··███
    """

    query_lengths: Any
    key_lengths: Any = None
    causal: bool = False
    window: Any = None

    def __post_init__(self) -> None:
        queries = whole_numbers("Documents' query_lengths", self.query_lengths, least=0)
        object.__setattr__(self, "query_lengths", queries)
        if self.key_lengths is not None:
            keys = whole_numbers("Documents' key_lengths", self.key_lengths, least=0)
            if len(keys) != len(queries):
                raise ValueError(
                    f"Documents needs as many key segments as query segments, got {len(queries)} "
                    f"query_lengths and {len(keys)} key_lengths"
                )
            object.__setattr__(self, "key_lengths", keys)
        if not isinstance(self.causal, (bool, np.bool_)):
            raise TypeError(f"Documents' causal must be a bool, got {type(self.causal).__name__}")
        object.__setattr__(self, "window", _window_pair(self.window, bool(self.causal)))

    @cached_property
    def _starts(self) -> tuple[Array, Array]:
        """First query and first key of each segment, and the totals at the end."""
        keys = self.query_lengths if self.key_lengths is None else self.key_lengths
        return (
            np.concatenate([[0], np.cumsum(np.array(self.query_lengths, np.int64))]).astype(np.int64),
            np.concatenate([[0], np.cumsum(np.array(keys, np.int64))]).astype(np.int64),
        )

    def _bounds(self, i: Array) -> tuple[Array, Array]:
        """The interval [lo, hi) of keys of the queries i, not yet emptied where hi <= lo."""
        query_starts, key_starts = self._starts
        segment = np.searchsorted(query_starts, i, side="right") - 1
        lo, hi = key_starts[segment], key_starts[segment + 1]
        own = i - query_starts[segment + 1] + hi  # key position of the query: the last stands at hi - 1
        left, right = self.window if self.window is not None else (None, None)
        if self.causal:
            hi = np.minimum(hi, own + 1)
        if right is not None:
            hi = np.minimum(hi, own + min(right, FAR) + 1)
        if left is not None:
            lo = np.maximum(lo, own - min(left, FAR))
        return lo, hi

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        lo, hi = self._bounds(i)
        visible: Array = (j >= lo) & (j < hi)
        return visible

    def intervals(self, extent: Extent) -> tuple[Array, Array]:
        lo, hi = self._bounds(np.arange(extent.len_q).reshape(1, 1, -1))
        return as_intervals(lo, hi, extent.len_k)

    def check(self, extent: Extent) -> None:
        query_starts, key_starts = self._starts
        for name, total, length in (
            ("query_lengths", query_starts[-1], extent.len_q),
            ("key_lengths", key_starts[-1], extent.len_k),
        ):
            if total != length:
                axis = "len_q" if name == "query_lengths" else "len_k"
                raise ValueError(
                    f"Documents' {name} must sum to {axis}: they sum to {total}, {axis} is {length}"
                )


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Every query sees the first ``length`` keys: ``j < length``.

    Parameters
    ----------
    length : int >= 0 or array of shape (batch,)
        More than len_k is len_k. With 0 all rows are empty.

    Examples
    --------
    The mask of a prefix language model:

    >>> from npattn.masks import Causal
    >>> print((Prefix(3) | Causal()).picture(5, 5))
    ███··
    ███··
    ███··
    ████·
    █████
    """

    length: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", one_or_per_batch("Prefix's length", self.length, least=0))

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        visible: Array = j < take(per_batch(self.length), b)
        return visible

    def intervals(self, extent: Extent) -> tuple[Array, Array]:
        hi = per_batch(self.length)[:, None, None] + np.zeros(extent.len_q, np.int64)
        return as_intervals(np.zeros(1, np.int64), hi, extent.len_k)

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        return isinstance(self.length, tuple), False

    def check(self, extent: Extent) -> None:
        check_batch("Prefix's length", self.length, extent)


def _window_pair(window: Any, causal: bool) -> tuple[int | None, int | None] | None:
    """An int w is (w, 0) when causal, else (w, w); a pair is (left, right)."""
    if window is None:
        return None
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ValueError(f"window must be an int or a pair (left, right), got {len(window)} values")
        left, right = (
            None if side is None else whole_number("Documents' window", side, least=0) for side in window
        )
        return left, right
    width = whole_number("Documents' window", window, least=0)
    return width, 0 if causal else width


__all__ = ["Causal", "Documents", "Full", "Padding", "Prefix", "Window"]
