"""The matrix cut into tiles: which tiles are empty, full or partial, and what the partial ones look like.

This is how masks that are no intervals are read without asking them pair by pair:

1. ``tile_class`` tells EMPTY, PARTIAL or FULL for every tile of the (rows, cols) grid; ``&`` is the minimum
   of two classes, ``|`` the maximum, ``~`` swaps the ends. PARTIAL is always a permitted answer.
2. Partial tiles with equal ``signature`` hold equal pairs; one of each kind is looked at, through
   ``bitmaps``: words of 32 pairs from intervals and their compositions, pair by pair in chunks otherwise.
3. What turns out to be empty or full after all becomes so; equal bitmaps are stored once.

The largest arrays have one entry per tile, never one per pair.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from npattn._typing import Array
from npattn.masks.base import Extent, Mask

EMPTY: Final = 0
PARTIAL: Final = 1
FULL: Final = 2

_CHUNK: Final = 2**21  # pairs looked at in one go


class Tiles(NamedTuple):
    """What every tile of a mask holds."""

    code: Array  # (batch or 1, heads or 1, rows, cols) int32: 0 empty, 1 full, 2 + n: bitmaps[n]
    bitmaps: Array  # (unique, tile_q, tile_k // 32) uint32, bit j % 32 of word j // 32; 0 beyond the edges


class Grid:
    """One extent cut into tiles of tile_q × tile_k; remembers the intervals of the masks it was asked about.

    Parameters
    ----------
    extent : Extent
        The sizes; len_q and len_k need not be multiples of the tile.
    tile_q, tile_k : int
        Rows and columns of a tile; tile_k is a multiple of 32.
    """

    def __init__(self, extent: Extent, tile_q: int, tile_k: int) -> None:
        self.extent = extent
        self.tile_q = tile_q
        self.tile_k = tile_k
        self.rows = -(-extent.len_q // tile_q)
        self.cols = -(-extent.len_k // tile_k)
        self._memo: dict[tuple[int, str], tuple[Mask, Any]] = {}

    def remember(self, mask: Mask, what: str, make: Any) -> Any:
        """``make()``, computed once for this mask on this grid."""
        key = (id(mask), what)
        if key not in self._memo:
            self._memo[key] = (mask, make())  # holding the mask keeps its id from being used again
        return self._memo[key][1]

    def patterns(self, marks: Array, tile: int) -> tuple[Array, Array, Array]:
        """Cut a bool vector into tiles: number of marks, size, and number of the pattern of each.

        Equal pattern numbers mean equal marks; what the last tile lacks counts as not marked.
        """
        length = len(marks)
        count = -(-length // tile)
        cut = np.zeros((count, tile), bool)
        cut.reshape(-1)[:length] = marks
        size = np.minimum(tile, length - np.arange(count) * tile)
        return cut.sum(axis=1), size, _unique_rows(np.packbits(cut, axis=1))[1]

    # Interval masks

    def _intervals(self, mask: Mask) -> Any:
        return self.remember(mask, "intervals", lambda: mask.intervals(self.extent))

    def _summary(self, mask: Mask) -> Any:
        """Per row of tiles: (largest lo, smallest hi, hull lo, hull hi); None for other masks."""

        def make() -> Any:
            intervals = self._intervals(mask)
            return None if intervals is None else summarise(intervals[0], intervals[1], self.tile_q)

        return self.remember(mask, "summary", make)

    def interval_class(self, mask: Mask, b: Array, h: Array, r: Array, c: Array) -> Array:
        """`Mask.tile_class` of an interval mask; all PARTIAL for others."""
        summary = self._summary(mask)
        if summary is None:
            return np.full((1,) * r.ndim, PARTIAL, np.int8)
        lo_max, hi_min, hull_lo, hull_hi = (_take(part, b, h, r) for part in summary)
        first = c * self.tile_k
        stop = np.minimum(first + self.tile_k, self.extent.len_k)
        full = (lo_max <= first) & (hi_min >= stop)
        empty = (hull_hi <= first) | (hull_lo >= stop)
        return classify(full, ~empty)

    def interval_signature(self, mask: Mask, b: Array, h: Array, r: Array, c: Array) -> list[Array]:
        """`Mask.signature` of an interval mask: the clipped intervals of the tile's rows, numbered."""
        if self._intervals(mask) is None:
            return [np.arange(len(r))]

        def rows(part: slice) -> Array:
            ends = np.stack(self._clipped(mask, b[part], h[part], r[part], c[part]), axis=1).astype(np.int32)
            return ends.reshape(len(ends), -1).view(np.uint8)

        return [self.number(rows, len(r), 8 * self.tile_q)]

    def interval_bitmaps(self, mask: Mask, b: Array, h: Array, r: Array, c: Array) -> Array:
        """`Mask.bitmaps` of an interval mask; others are asked pair by pair."""
        if self._intervals(mask) is None:
            return self.look(mask, b, h, r, c)
        out = np.empty((len(r), self.tile_q, self.tile_k // 32), np.uint32)
        for part in self._parts(len(r), 8 * self.tile_q):
            lo, hi = self._clipped(mask, b[part], h[part], r[part], c[part])
            for word in range(self.tile_k // 32):
                behind = _low_bits(np.clip(lo - 32 * word, 0, 32))
                out[part, :, word] = _low_bits(np.clip(hi - 32 * word, 0, 32)) & ~behind
        return out

    def look(self, mask: Mask, b: Array, h: Array, r: Array, c: Array) -> Array:
        """Bitmaps of the given tiles by asking ``allowed``; only ever about places that exist."""
        extent = self.extent
        out = np.empty((len(r), self.tile_q, self.tile_k // 32), np.uint32)
        for part in self._parts(len(r), self.tile_q * self.tile_k):
            i = r[part, None, None] * self.tile_q + np.arange(self.tile_q)[:, None]
            j = c[part, None, None] * self.tile_k + np.arange(self.tile_k)
            inside = (i < extent.len_q) & (j < extent.len_k)
            visible = mask.allowed(
                extent,
                b[part, None, None],
                h[part, None, None],
                np.minimum(i, extent.len_q - 1),
                np.minimum(j, extent.len_k - 1),
            )
            out[part] = pack_words(visible & inside)
        return out

    def whole(self, r: Array, c: Array) -> Array:
        """Bitmaps of full tiles, cut at the edges of the matrix."""
        last_row, last_col = r == self.rows - 1, c == self.cols - 1
        bitmaps: Array = _edge_bitmaps(self)[last_row * 2 + last_col * 1]
        return bitmaps

    def number(self, rows: Callable[[slice], Array], count: int, size: int) -> Array:
        """Number ``count`` byte strings so that equal numbers mean equal strings, chunk by chunk.

        ``rows(part)`` gives those of a slice as a 2-D uint8 array; ``size`` is about the bytes of one.
        """
        number = np.empty(count, np.int64)
        known: dict[bytes, int] = {}
        for part in self._parts(count, size):
            strings = np.ascontiguousarray(rows(part))
            first, inverse = _unique_rows(strings)
            numbers = [known.setdefault(strings[n].tobytes(), len(known)) for n in first]
            number[part] = np.array(numbers, np.int64)[inverse]
        return number

    def _clipped(self, mask: Mask, b: Array, h: Array, r: Array, c: Array) -> tuple[Array, Array]:
        """The intervals of the tiles' rows relative to the tile's first key, (n, tile_q), clipped."""
        i = r[:, None] * self.tile_q + np.arange(self.tile_q)
        inside = i < self.extent.len_q
        i = np.minimum(i, self.extent.len_q - 1)
        lo, hi = (
            np.clip(_take(end, b[:, None], h[:, None], i) - c[:, None] * self.tile_k, 0, self.tile_k)
            for end in self._intervals(mask)
        )
        return np.where(inside, lo, 0), np.where(inside, hi, 0)

    def _parts(self, count: int, size: int) -> Iterator[slice]:
        step = max(1, _CHUNK // size)
        return (slice(start, min(start + step, count)) for start in range(0, count, step))

    def part_signature(self, mask: Mask, b: Array, h: Array, r: Array, c: Array) -> list[Array]:
        """The signature of one part of a composite: its class, and its own signature where PARTIAL."""
        kind = np.broadcast_to(mask.tile_class(self, b, h, r, c), r.shape)
        partial = np.flatnonzero(kind == PARTIAL)
        columns = [kind.astype(np.int64)]
        if len(partial):
            for inner in mask.signature(self, b[partial], h[partial], r[partial], c[partial]):
                column = np.zeros(len(r), np.int64)
                column[partial] = inner
                columns.append(column)
        return columns


def classify(full: Array, some: Array) -> Array:
    """FULL, PARTIAL or EMPTY of tiles that are all visible, and that hold something visible."""
    return np.where(full, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.int8)


def summarise(lo: Array, hi: Array, tile_q: int) -> tuple[Array, Array, Array, Array]:
    """Reduce intervals (..., len_q) over the rows of each tile: largest lo, smallest hi, hull lo, hull hi.

    A row that sees nothing makes the smallest hi 0, and does not count in the hull; a tile row of only such
    rows has the hull [0, 0).
    """
    starts = np.arange(0, lo.shape[-1], tile_q)
    if not len(starts):
        empty = np.zeros((*lo.shape[:-1], 0), np.int64)
        return empty, empty, empty, empty
    hull_hi = np.maximum.reduceat(hi, starts, axis=-1)
    hull_lo = np.minimum.reduceat(np.where(lo < hi, lo, np.iinfo(np.int64).max), starts, axis=-1)
    hull_lo = np.where(hull_hi > 0, hull_lo, 0)
    return (
        np.maximum.reduceat(lo, starts, axis=-1),
        np.minimum.reduceat(hi, starts, axis=-1),
        hull_lo,
        hull_hi,
    )


def read_tiles(mask: Mask, extent: Extent, tile_q: int, tile_k: int) -> Tiles:
    """Class and bitmaps of every tile of ``mask``.

    Parameters
    ----------
    mask : Mask
        Any mask.
    extent : Extent
        Sizes; the mask's own sizes are checked against them.
    tile_q, tile_k : int
        Tile; tile_k a multiple of 32.

    Returns
    -------
    Tiles
        Exact: a tile is EMPTY or FULL in it whenever its pairs are.

    Notes
    -----
    Cost: one entry per tile, plus the pairs of one partial tile of each kind.
    """
    mask.check(extent)
    grid = Grid(extent, tile_q, tile_k)
    by_batch, by_head = mask.varies(extent)
    lists = (extent.batch if by_batch else 1, extent.heads if by_head else 1)
    code = np.zeros((*lists, grid.rows, grid.cols), np.int32)
    no_bitmaps = np.zeros((0, tile_q, tile_k // 32), np.uint32)
    if code.size == 0:
        return Tiles(code, no_bitmaps)

    b, h, r, c = np.ogrid[: lists[0], : lists[1], : grid.rows, : grid.cols]
    kind = np.broadcast_to(mask.tile_class(grid, b, h, r, c), code.shape)
    code[kind == FULL] = 1
    place = np.flatnonzero(kind == PARTIAL)
    if not len(place):
        return Tiles(code, no_bitmaps)

    b, h, r, c = np.unravel_index(place, code.shape)
    columns = mask.signature(grid, b, h, r, c)
    cut_q, cut_k = extent.len_q % tile_q != 0, extent.len_k % tile_k != 0
    edges = (r == grid.rows - 1) * 2 * cut_q + (c == grid.cols - 1) * 1 * cut_k
    first, inverse = _unique_tuples([edges, *columns])
    b, h, r, c = b[first], h[first], r[first], c[first]
    packed = mask.bitmaps(grid, b, h, r, c)

    words = packed.reshape(len(packed), -1)
    is_full = (words == grid.whole(r, c).reshape(words.shape)).all(axis=1)
    is_bits = ~is_full & words.any(axis=1)
    unique, number = _unique_rows(words[is_bits].view(np.uint8))
    found = is_full.astype(np.int32)
    found[is_bits] = number + 2
    code.reshape(-1)[place] = found[inverse]
    return Tiles(code, np.ascontiguousarray(packed[is_bits][unique]))


def count_visible(mask: Mask, extent: Extent) -> int:
    """How many pairs are visible, over all batch elements and heads."""
    mask.check(extent)
    if 0 in extent:
        return 0
    by_batch, by_head = mask.varies(extent)
    copies = (1 if by_batch else extent.batch) * (1 if by_head else extent.heads)
    intervals = mask.intervals(extent)
    if intervals is not None:
        lo, hi = intervals
        shape = (extent.batch if by_batch else 1, extent.heads if by_head else 1, extent.len_q)
        return int(np.broadcast_to(hi - lo, shape).sum()) * copies
    tiles = read_tiles(mask, extent, 64, 64)
    rows, cols = tiles.code.shape[2:]
    height = np.minimum(64, extent.len_q - np.arange(rows) * 64)
    width = np.minimum(64, extent.len_k - np.arange(cols) * 64)
    full = ((tiles.code == 1) * height[:, None] * width).sum()
    bits = np.bitwise_count(tiles.bitmaps).sum(axis=(1, 2), dtype=np.int64)
    uses = np.bincount(tiles.code.reshape(-1), minlength=len(bits) + 2)[2:]
    return (int(full) + int(bits @ uses)) * copies


def draw(mask: Mask, extent: Extent, b: int, h: int, width: int) -> str:
    """The text behind `Mask.picture`."""
    mask.check(extent)
    if not (0 <= b < extent.batch and 0 <= h < extent.heads):
        raise ValueError(
            f"picture draws one batch element and head; b={b}, h={h} is not within "
            f"batch={extent.batch}, heads={extent.heads}"
        )
    if extent.len_q == 0 or extent.len_k == 0:
        return ""
    per_q = -(-extent.len_q // width)
    per_k = -(-extent.len_k // width)
    lines = []
    j = np.arange(extent.len_k).reshape(1, 1, 1, -1)
    starts = np.arange(0, extent.len_k, per_k)
    sizes = np.diff(np.append(starts, extent.len_k))
    at_b, at_h = np.full((1, 1, 1, 1), b), np.full((1, 1, 1, 1), h)
    for top in range(0, extent.len_q, per_q):
        i = np.arange(top, min(top + per_q, extent.len_q)).reshape(1, 1, -1, 1)
        visible = mask.allowed(extent, at_b, at_h, i, j)
        visible = np.broadcast_to(visible, (1, 1, i.size, j.size))[0, 0]
        count = np.add.reduceat(visible.sum(axis=0), starts)
        full = count == sizes * i.size
        lines.append("".join(np.where(full, "█", np.where(count > 0, "▒", "·"))))
    return "\n".join(lines)


def pack_words(visible: Array) -> Array:
    """Bool (..., width) to uint32 (..., width // 32), bit j % 32 of word j // 32; width a multiple of 32."""
    packed = np.packbits(visible, axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.dtype("<u4")).astype(np.uint32, copy=False)


def _edge_bitmaps(grid: Grid) -> Array:
    """Bitmaps of full tiles: [0] inside, [1] in the last column, [2] in the last row, [3] in the corner."""
    visible = np.ones((4, grid.tile_q, grid.tile_k), bool)
    last_q = grid.extent.len_q - (grid.rows - 1) * grid.tile_q
    last_k = grid.extent.len_k - (grid.cols - 1) * grid.tile_k
    visible[2:, last_q:] = False
    visible[1::2, :, last_k:] = False
    return pack_words(visible)


def _low_bits(count: Array) -> Array:
    """Words with the lowest 0 to 32 bits set."""
    return ((np.uint64(1) << count.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)


def _take(values: Array, b: Array, h: Array, index: Array) -> Array:
    """values[b, h, index], where the first two axes may be broadcast ones."""
    taken: Array = values[b if values.shape[0] > 1 else 0, h if values.shape[1] > 1 else 0, index]
    return taken


def _unique_tuples(columns: list[Array]) -> tuple[Array, Array]:
    """Distinct tuples (one per place along the columns): where each is first met, and which each place is."""
    key = np.zeros(len(columns[0]), np.int64)
    count = 1
    for column in columns:
        least, most = int(column.min()), int(column.max())
        if least == most:
            continue
        span = most - least + 1
        if count * span > 4 * len(key) + 1024:  # number the values anew, so that keys stay small
            first, column = _unique_keys(column - least, span)
            least, span = 0, len(first)
        if count * span > 2**62:
            first, key = _unique_keys(key, count)
            count = len(first)
        key = key * span + (column - least)
        count *= span
    return _unique_keys(key, count)


def _unique_keys(key: Array, count: int) -> tuple[Array, Array]:
    """Distinct values of ``key`` (0 <= key < count): (first place of each, number of each place)."""
    if count > 8 * len(key) + 1024:
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        return first, inverse
    first_place = np.full(count, -1, np.int64)
    first_place[key[::-1]] = np.arange(len(key) - 1, -1, -1)
    used = first_place >= 0
    return first_place[used], (np.cumsum(used) - 1)[key]


def _unique_rows(rows: Array) -> tuple[Array, Array]:
    """Distinct rows of a 2-D uint8 array: (first place of each, number of each row)."""
    if len(rows) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rows = np.ascontiguousarray(rows)
    spare = -rows.shape[1] % 8
    if spare:
        rows = np.concatenate([rows, np.zeros((len(rows), spare), np.uint8)], axis=1)
    words = rows.view(np.uint64)
    factors = np.random.default_rng(0).integers(
        0, 2**64, words.shape[1], np.uint64, endpoint=False
    ) | np.uint64(1)
    digest = (words * factors).sum(axis=1, dtype=np.uint64)
    _, first, inverse = np.unique(digest, return_index=True, return_inverse=True)
    if not np.array_equal(words[first][inverse], words):  # two rows share a digest
        _, first, inverse = np.unique(
            rows.view(np.dtype((np.void, rows.shape[1])))[:, 0], return_index=True, return_inverse=True
        )
    return first, inverse


__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Grid",
    "Tiles",
    "classify",
    "count_visible",
    "draw",
    "pack_words",
    "read_tiles",
    "summarise",
]
