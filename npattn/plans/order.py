"""An order of queries and keys in which a scattered mask stands together.

A tile costs the same whether one of its pairs is visible or all are. Masks whose pairs lie apart by rule
touch many tiles with few pairs each: under ``Dilated(128, 4)`` a query sees every fourth key, and under
``Strided(128)`` or ``GlobalTokens`` every tile of a token seen by all has one column of it. Attention does
not care in which order queries and keys come, so they may be sorted first:

- **Dilated**: by position modulo the dilation. A query and its keys share the remainder: one interval.
- **Strided, GlobalTokens**: the marked tokens first. A query sees some of them, and its own neighbourhood
  among the others: two intervals.

Masks composed with ``&``, ``|`` and ``~`` around one such mask work as long as what is left is an interval
for each query.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from npattn._typing import Array
from npattn.masks._arguments import FAR
from npattn.masks.base import And, Extent, Mask, Not, Or, as_intervals
from npattn.masks.interval import Full, Window
from npattn.masks.pattern import Dilated, GlobalTokens, Strided

#: Below this many queries or keys the tiles saved are not worth the copies.
LEAST: Final = 512
#: Keys of a tile, about, and how many tiles of a row must be saved for the copies to pay off.
TILE: Final = 64
SAVED: Final = 8


class Order(NamedTuple):
    """Where queries and keys come from, and the mask they then have."""

    rows: Array  # int64 (len_q,): query n of the new order is query rows[n] of the old one
    cols: Array  # int64 (len_k,): the same for keys
    row_of: Array  # the way back: query i is number row_of[i] of the new order
    col_of: Array
    mask: Mask  # of the new order


@dataclass(frozen=True, eq=False)
class _Listed(Mask):
    """Intervals written down: ``lo[b, h, i] <= j < hi[b, h, i]``. Equal to itself only."""

    lo: Array  # int64 (batch or 1, heads or 1, len_q)
    hi: Array

    def intervals(self, extent: Extent) -> tuple[Array, Array]:
        """See Mask."""
        return self.lo, self.hi

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        """See Mask."""
        return self.lo.shape[0] > 1, self.lo.shape[1] > 1

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        """See Mask."""
        b = b if self.lo.shape[0] > 1 else np.zeros_like(b)
        h = h if self.lo.shape[1] > 1 else np.zeros_like(h)
        visible: Array = (j >= self.lo[b, h, i]) & (j < self.hi[b, h, i])
        return visible

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def order_of(mask: Mask | None, extent: Extent) -> Order | None:
    """A better order for ``mask``, or None where the given one is as good or no better one is known.

    Cost O(len_q + len_k) memory and O(len log len) time, remembered for the last few masks.

    Examples
    --------
    >>> from npattn.masks import Dilated
    >>> order = order_of(Dilated(100, 2), Extent(1, 1, 600, 600))
    >>> order.cols[:4].tolist(), order.cols[300:303].tolist()
    ([0, 2, 4, 6], [1, 3, 5])
    """
    if mask is None or min(extent.len_q, extent.len_k) < LEAST:
        return None
    return _remembered(mask, extent) if mask.cacheable else _order(mask, extent)


def _order(mask: Mask, extent: Extent) -> Order | None:
    scattered = {leaf for leaf in _leaves(mask) if _is_scattered(leaf)}
    if len(scattered) != 1:
        return None
    mask.check(extent)
    leaf = scattered.pop()
    if isinstance(leaf, Dilated):
        return _by_remainder(mask, leaf, extent)
    return _marked_first(mask, leaf, extent)


_remembered = lru_cache(maxsize=16)(_order)


def _leaves(mask: Mask) -> list[Mask]:
    if isinstance(mask, And | Or):
        return _leaves(mask.left) + _leaves(mask.right)
    return _leaves(mask.mask) if isinstance(mask, Not) else [mask]


def _is_scattered(leaf: Mask) -> bool:
    if isinstance(leaf, Dilated):
        return leaf.dilation > 1 and leaf.radius > 0 and not isinstance(leaf.offset, tuple)
    return isinstance(leaf, GlobalTokens) or (isinstance(leaf, Strided) and leaf.stride > 1)


def _with(mask: Mask, leaf: Mask, other: Mask) -> Mask:
    """``mask`` with ``other`` in the place of ``leaf``."""
    if isinstance(mask, And | Or):
        return type(mask)(_with(mask.left, leaf, other), _with(mask.right, leaf, other))
    if isinstance(mask, Not):
        return Not(_with(mask.mask, leaf, other))
    return other if mask == leaf else mask


def _by_remainder(mask: Mask, leaf: Dilated, extent: Extent) -> Order | None:
    """Sorted by position modulo the dilation."""
    step = leaf.dilation
    if step > extent.len_k // 2:  # hardly a key has a companion
        return None
    shift = extent.len_k - extent.len_q if leaf.offset is None else leaf.offset
    elsewhere = _with(mask, leaf, ~Full()).intervals(extent)  # between different remainders
    reach = min(leaf.radius * step, FAR)
    band = Window(reach, reach, offset=leaf.offset)
    within = _with(mask, leaf, band).intervals(extent)
    if elsewhere is None or within is None or bool((elsewhere[0] < elsewhere[1]).any()):
        return None
    remainder = (np.arange(extent.len_q) + shift) % step
    rows = np.argsort(remainder, kind="stable")
    cols = np.argsort(np.arange(extent.len_k) % step, kind="stable")
    sizes = -(-(extent.len_k - np.arange(step)) // step)  # keys of each remainder
    starts = np.cumsum(sizes) - sizes
    lo, hi = (starts[remainder] - (remainder - end) // step for end in within)  # the first at or behind end
    empty = within[0] >= within[1]
    lo, hi = as_intervals(np.where(empty, 0, lo), np.where(empty, 0, hi), extent.len_k)
    return _order_with(rows, cols, _Listed(lo[..., rows], hi[..., rows]))


def _marked_first(mask: Mask, leaf: Mask, extent: Extent) -> Order | None:
    """The tokens that see and are seen by all in front."""
    seen_by_all = _with(mask, leaf, Full()).intervals(extent)
    others = _with(mask, leaf, ~Full()).intervals(extent)
    if seen_by_all is None or others is None:
        return None
    marked_q, marked_k = (_marked(leaf, size) for size in (extent.len_q, extent.len_k))
    places = np.flatnonzero(marked_k)
    touched = len(np.unique(places // TILE))
    if touched - -(-len(places) // TILE) < SAVED:
        return None
    rows = np.argsort(~marked_q, kind="stable")
    cols = np.argsort(~marked_k, kind="stable")
    first = int(marked_k.sum())
    before_marked = np.concatenate([[0], np.cumsum(marked_k)])  # marked keys before each place
    before_others = np.concatenate([[0], np.cumsum(~marked_k)]) + first
    shape = np.broadcast_shapes(seen_by_all[0].shape, others[0].shape)
    # a marked query sees every key as one that sees all; any query sees the marked keys so
    near = [
        np.where(marked_q, np.broadcast_to(a, shape), b) for a, b in zip(seen_by_all, others, strict=True)
    ]
    parts = []
    for (lo, hi), before in ((seen_by_all, before_marked), (near, before_others)):
        ends = as_intervals(before[lo], before[hi], extent.len_k)
        parts.append(_Listed(*(end[..., rows] for end in ends)))
    return _order_with(rows, cols, parts[0] | parts[1])


def _order_with(rows: Array, cols: Array, mask: Mask) -> Order:
    return Order(rows, cols, np.argsort(rows), np.argsort(cols), mask)


def _marked(leaf: Mask, size: int) -> Array:
    assert isinstance(leaf, GlobalTokens | Strided)
    return leaf._marked(np.arange(size))


__all__ = ["Order", "order_of"]
