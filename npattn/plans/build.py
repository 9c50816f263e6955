"""From a mask to a TilePlan.

Two roads. A mask that gives intervals is read by reductions over lo and hi: at most three spans per row of
tiles and segment of keys, O(len_q) work and memory, whatever len_k. Any other mask is read tile by tile
(`npattn.masks.grid`): one int per tile, never one per pair.

Both roads end in the same step, which turns the lists by query into the lists by key without writing out the
tiles inside a span.
"""

import threading
from collections import OrderedDict
from typing import Final

import numpy as np

from npattn._typing import Array
from npattn.masks.base import Extent, Mask
from npattn.masks.grid import read_tiles
from npattn.masks.interval import Full
from npattn.plans.tiles import BITS, FULL, INTERVAL, TilePlan, plan_nbytes

MAX_PLANS: Final = 256
MAX_BYTES: Final = 256 * 2**20

_FULL_MASK: Final = Full()


class _Cache:
    """Plans by (mask, extent, tile_q, tile_k), the least recently used leave first; safe between threads."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[Mask, Extent, int, int], TilePlan] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: tuple[Mask, Extent, int, int]) -> TilePlan | None:
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
            return plan

    def put(self, key: tuple[Mask, Extent, int, int], plan: TilePlan) -> None:
        size = _entry_bytes(key, plan)
        if size > MAX_BYTES // 4:
            return  # one plan must not push out all others
        with self._lock:
            if key in self._plans:
                return
            self._plans[key] = plan
            self._bytes += size
            while len(self._plans) > MAX_PLANS or self._bytes > MAX_BYTES:
                old_key, old_plan = self._plans.popitem(last=False)
                self._bytes -= _entry_bytes(old_key, old_plan)

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()
            self._bytes = 0


_cache = _Cache()


def tile_plan(mask: Mask | None, extent: Extent, tile_q: int, tile_k: int) -> TilePlan:
    """The plan of ``mask`` for one extent and tile, from the cache where it is known.

    Parameters
    ----------
    mask : Mask or None
        None is `Full`.
    extent : Extent
        Batch, query heads, len_q, len_k of the call.
    tile_q, tile_k : int
        Rows and columns of a tile; tile_k is a multiple of 32.

    Returns
    -------
    TilePlan
        All arrays read-only; the caller may keep it.

    Raises
    ------
    ValueError
        When the mask was made for other sizes, or tile_k is not a multiple of 32.

    Notes
    -----
    Interval masks cost O(len_q) per distinct list. Equal lists are stored once, so a mask that happens to be
    the same for all heads costs one. Masks that may give another answer tomorrow (`Predicate`) are built
    anew each time. The cache holds at most 256 plans and 256 MiB.

    Examples
    --------
    >>> from npattn.masks import Causal
    >>> plan = tile_plan(Causal(), Extent(2, 4, 1_000_000, 1_000_000), 64, 64)
    >>> len(plan.row_first), len(plan.col_first)  # spans: two per row and per column but one
    (31249, 31249)
    >>> tile_plan(Causal(), Extent(2, 4, 1_000_000, 1_000_000), 64, 64) is plan
    True
    """
    if mask is None:
        mask = _FULL_MASK
    key = (mask, extent, tile_q, tile_k)
    if mask.cacheable:
        plan = _cache.get(key)
        if plan is not None:
            return plan
    plan = build_tile_plan(mask, extent, tile_q, tile_k)
    if mask.cacheable:
        _cache.put(key, plan)
    return plan


def clear_plans() -> None:
    """Forget every cached plan."""
    _cache.clear()


def build_tile_plan(mask: Mask, extent: Extent, tile_q: int, tile_k: int) -> TilePlan:
    """`tile_plan` without the cache."""
    if tile_q < 1 or tile_k < 32 or tile_k % 32:
        raise ValueError(f"tile_q must be positive and tile_k a multiple of 32, got {tile_q} and {tile_k}")
    mask.check(extent)
    if type(mask) is Full and extent.len_q and extent.len_k:
        return _full(extent, tile_q, tile_k)
    intervals = mask.intervals(extent)
    if intervals is None:
        return _from_tiles(mask, extent, tile_q, tile_k)
    lo, hi = intervals
    if lo.size and extent.len_k and not lo.any() and hi.min() == extent.len_k:
        return _full(extent, tile_q, tile_k)
    return _from_intervals(lo, hi, extent, tile_q, tile_k)


def _full(extent: Extent, tile_q: int, tile_k: int) -> TilePlan:
    """What ``_from_intervals`` would give, written down: decoding asks for another length at every token."""
    rows, cols = -(-extent.len_q // tile_q), -(-extent.len_k // tile_k)

    def spans(lines: int, across: int) -> Spans:
        zeros = np.zeros(lines, np.int64)
        return np.arange(lines), zeros, zeros + across, zeros + FULL, zeros - 1

    none, bits = np.zeros((1, 0), np.int32), np.zeros((0, tile_q, tile_k // 32), np.int32)
    list_of = np.zeros((1, 1), np.int32)
    return _assemble(extent, tile_q, tile_k, list_of, spans(rows, cols), spans(cols, rows), none, none, bits)


def _from_intervals(lo: Array, hi: Array, extent: Extent, tile_q: int, tile_k: int) -> TilePlan:
    """Classify by reductions; lo, hi (batch or 1, heads or 1, len_q)."""
    list_of, (lo, hi) = _distinct_lists(lo, hi)
    lists = len(lo)
    rows, cols = -(-extent.len_q // tile_q), -(-extent.len_k // tile_k)
    row, seg_lo, seg_hi, full_first, full_stop = _row_segments(lo, hi, extent.len_k, tile_q, tile_k)
    # Three spans a segment: before, inside and behind the full tiles; many of them empty.
    cuts = np.stack([seg_lo // tile_k, full_first, full_stop, -(-seg_hi // tile_k)], axis=1)
    kept = cuts[:, :-1] < cuts[:, 1:]
    line = np.repeat(row, 3).reshape(-1, 3)[kept]
    kinds = np.broadcast_to(np.array([INTERVAL, FULL, INTERVAL]), kept.shape)[kept]
    by_row: Spans = (line, cuts[:, :-1][kept], cuts[:, 1:][kept], kinds, np.full(len(kinds), -1))
    if not (kinds == INTERVAL).any():
        lo = hi = np.zeros((lists, 0), np.int32)
    bits = np.zeros((0, tile_q, tile_k // 32), np.int32)
    return _assemble(
        extent, tile_q, tile_k, list_of, by_row, transpose(by_row, lists, rows, cols), lo, hi, bits
    )


def _row_segments(
    lo: Array, hi: Array, len_k: int, tile_q: int, tile_k: int
) -> tuple[Array, Array, Array, Array, Array]:
    """The stretches of keys that each row of tiles sees, as (row, lo, hi, full tiles' first, stop).

    lo, hi are (lists, len_q); rows are numbered through all lists. Stretches whose tiles are neighbours are
    one; full_first == full_stop == the end where no tile is full.
    """
    lists, len_q = lo.shape
    rows = -(-len_q // tile_q)

    def by_tile(x: Array) -> Array:
        """(lists, len_q) -> (lists * rows, tile_q), zeros behind the end."""
        if rows * tile_q != len_q:
            padded = np.zeros((lists, rows * tile_q), x.dtype)
            padded[:, :len_q] = x
            x = padded
        return x.reshape(lists * rows, tile_q)

    seen, lo, hi = by_tile(lo < hi), by_tile(lo), by_tile(hi)
    nothing = np.iinfo(lo.dtype).max
    lo_or_far = np.where(seen, lo, nothing)

    # Full tiles are the ones every existing query of the row sees whole.
    real = np.tile(np.minimum(tile_q, len_q - np.arange(rows) * tile_q), lists)
    all_seen = seen.sum(axis=1) == real
    lo_max = np.where(seen, lo, 0).max(axis=1, initial=0)
    hi_min = np.where(seen, hi, nothing).min(axis=1, initial=nothing)
    row_first = -(-lo_max // tile_k)
    row_stop = np.where(hi_min >= len_k, -(-len_k // tile_k), hi_min // tile_k)
    has_full = all_seen & (row_first < row_stop)

    # Walk the intervals of a row by lo; a stretch ends where the next one leaves a tile out.
    if np.any(lo_or_far[:, 1:] < lo_or_far[:, :-1]):
        order = np.argsort(lo_or_far, axis=1, kind="stable")
        lo_or_far = np.take_along_axis(lo_or_far, order, axis=1)
        hi = np.take_along_axis(hi, order, axis=1)
        seen = np.take_along_axis(seen, order, axis=1)
    reach = np.maximum.accumulate(hi, axis=1)
    starts = seen.copy()  # does a stretch start at this query?
    starts[:, 1:] &= lo_or_far[:, 1:] // tile_k > (reach[:, :-1] - 1) // tile_k + 1
    row, place = np.nonzero(starts)
    seg_lo = lo_or_far[row, place]
    ends = np.append(place[1:], tile_q)
    ends[np.append(row[1:] != row[:-1], True) if len(row) else slice(0)] = tile_q
    seg_hi = reach[row, ends[: len(row)] - 1] if len(row) else seg_lo
    end = -(-seg_hi // tile_k)
    full_first = np.where(has_full[row], row_first[row], end)
    full_stop = np.where(has_full[row], row_stop[row], end)
    return row, seg_lo, seg_hi, full_first, full_stop


def _distinct_lists(lo: Array, hi: Array) -> tuple[Array, tuple[Array, Array]]:
    """Store equal lists once: list_of (batch or 1, heads or 1), and lo, hi (lists, len_q) int32."""
    batch, heads, len_q = lo.shape
    lo, hi = (np.ascontiguousarray(end, np.int32).reshape(batch * heads, len_q) for end in (lo, hi))
    if len(lo) == 0:  # no batch element at all: one empty list
        return np.zeros((1, 1), np.int64), (np.zeros((1, len_q), np.int32),) * 2
    if len(lo) == 1:
        return np.zeros((1, 1), np.int64), (lo, hi)
    known: dict[bytes, int] = {}
    number = [known.setdefault(lo[n].tobytes() + hi[n].tobytes(), len(known)) for n in range(len(lo))]
    first = [number.index(n) for n in range(len(known))]
    return _shrink(np.array(number).reshape(batch, heads)), (lo[first], hi[first])


def _shrink(list_of: Array) -> Array:
    """Drop an axis of list_of along which nothing changes."""
    for axis in (0, 1):
        if list_of.shape[axis] and np.all(list_of == list_of.take([0], axis=axis)):
            list_of = list_of.take([0], axis=axis)
    return list_of


Spans = tuple[Array, Array, Array, Array, Array]  # line, first, stop, kind, bits; sorted by line, then first


def transpose(by_row: Spans, lists: int, rows: int, cols: int) -> Spans:
    """The lists by key of lists by query.

    Rows are compared with the row above; only the stretches of columns whose content changes between the two
    are written out, as events (column, row, new content). Sorted by column, neighbouring events are the ends
    of a span. The work is that of the spans read and written, not of the tiles in them.

    Parameters
    ----------
    by_row : tuple of arrays
        line (list · rows + row), first, stop, kind, bits of each span, ascending.
    lists, rows, cols : int
        Sizes.

    Returns
    -------
    tuple of arrays
        The same with line = list · cols + column.
    """
    line, first, stop, kind, bits = by_row
    content = kind + 3 * (bits + 1) + 1  # 0 is "no tile"
    # A list has one row more here, an empty one behind the last, where all open spans end.
    line = line + line // max(rows, 1)
    height, width = rows + 1, cols + 1

    # Each row as a step function over columns: (position, content from there on).
    key = np.concatenate([np.arange(lists * height) * width, line * width + stop, line * width + first])
    value = np.concatenate([np.zeros(lists * height + len(line), np.int64), content])
    order = np.argsort(key, kind="stable")
    key, value = key[order], value[order]
    last = np.append(key[1:] != key[:-1], True)  # at equal positions the later one, a start, holds
    key, value = key[last], value[last]

    # The union of each row's positions with those of the row above, and the contents of both.
    at = np.unique(np.concatenate([key, key[key < (lists * height - 1) * width] + width]))
    row, col = np.divmod(at, width)
    here = value[np.searchsorted(key, at, side="right") - 1]
    # Above the first row of a list lies the empty one behind the list before; above the very first, the last.
    above = value[np.searchsorted(key, at - width, side="right") - 1]
    next_col = np.append(col[1:], cols)
    next_col[np.append(row[1:] != row[:-1], True)] = cols
    changed = (here != above) & (col < cols)
    row, col, here, size = row[changed], col[changed], here[changed], (next_col - col)[changed]

    # Write the changed stretches out and sort by column; rows ascend already.
    ends = np.cumsum(size)
    col = np.arange(int(size.sum())) - np.repeat(ends - size, size) + np.repeat(col, size)
    row, here = np.repeat(row, size), np.repeat(here, size)
    n, row = np.divmod(row, height)
    column = n * cols + col
    order = np.argsort(column, kind="stable")
    column, row, here = column[order], row[order], here[order]
    kept = here[:-1] > 0  # the event behind an open span is always one of the same column
    content = here[:-1][kept] - 1
    return column[:-1][kept], row[:-1][kept], row[1:][kept], content % 3, content // 3 - 1


def _from_tiles(mask: Mask, extent: Extent, tile_q: int, tile_k: int) -> TilePlan:
    """Any mask, through the class and bitmap of every tile."""
    tiles = read_tiles(mask, extent, tile_q, tile_k)
    batch, heads, rows, cols = tiles.code.shape
    code = tiles.code.reshape(batch * heads, rows, cols)
    if len(code) == 0:
        list_of, code = np.zeros((1, 1), np.int64), np.zeros((1, rows, cols), np.int32)
    elif len(code) == 1:
        list_of = np.zeros((1, 1), np.int64)
    else:
        known: dict[bytes, int] = {}
        number = [known.setdefault(one.tobytes(), len(known)) for one in code]
        list_of = _shrink(np.array(number).reshape(batch, heads))
        code = code[[number.index(n) for n in range(len(known))]]
    lists = len(code)
    by_row = _runs(code.reshape(lists * rows, cols))
    by_col = _runs(np.ascontiguousarray(code.swapaxes(1, 2)).reshape(lists * cols, rows))
    lo = np.zeros((lists, 0), np.int32)
    bits = tiles.bitmaps.view(np.int32)
    return _assemble(extent, tile_q, tile_k, list_of, by_row, by_col, lo, lo, bits)


def _runs(code: Array) -> Spans:
    """Runs of equal codes along each line, without the empty ones."""
    lines, width = code.shape
    if code.size == 0:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing, nothing, nothing
    begins = np.ones((lines, width), bool)
    np.not_equal(code[:, 1:], code[:, :-1], out=begins[:, 1:])
    place = np.flatnonzero(begins)
    value = code.reshape(-1)[place]
    ends = np.append(place[1:], code.size)
    kept = value > 0
    place, ends, value = place[kept], ends[kept], value[kept].astype(np.int64)
    line = place // width
    kind = np.where(value == 1, FULL, BITS)
    return line, place - line * width, ends - line * width, kind, np.where(value == 1, -1, value - 2)


def _assemble(
    extent: Extent,
    tile_q: int,
    tile_k: int,
    list_of: Array,
    by_row: Spans,
    by_col: Spans,
    lo: Array,
    hi: Array,
    bits: Array,
) -> TilePlan:
    lists = len(lo)
    rows, cols = -(-extent.len_q // tile_q), -(-extent.len_k // tile_k)
    row_ptr, *row_fields = _pointers(by_row, lists, rows)
    col_ptr, *col_fields = _pointers(by_col, lists, cols)
    arrays = [list_of, row_ptr, *row_fields, col_ptr, *col_fields, lo, hi, bits]
    return TilePlan(extent.len_q, extent.len_k, tile_q, tile_k, *(_frozen(array) for array in arrays))


def _pointers(spans: Spans, lists: int, lines: int) -> tuple[Array, ...]:
    """Spans as CSR: pointers (lists, lines + 1), then first, stop, kind, bits."""
    line = spans[0]
    starts = np.searchsorted(line, np.arange(lists * lines + 1))
    begin = np.arange(lists)[:, None] * lines
    return (starts[begin + np.arange(lines + 1)], *spans[1:])


def _frozen(array: Array) -> Array:
    array = np.ascontiguousarray(array, dtype=np.int32)
    if array.flags.writeable:
        array = array.view() if array.base is None else array.copy()
        array.flags.writeable = False
    return array


def _entry_bytes(key: tuple[Mask, Extent, int, int], plan: TilePlan) -> int:
    return plan_nbytes(plan) + int(getattr(key[0], "nbytes", 0)) + 1024


__all__ = ["build_tile_plan", "clear_plans", "tile_plan", "transpose"]
