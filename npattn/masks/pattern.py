"""Masks of the sparse-attention literature: Dilated, Strided, GlobalTokens, Blocks, BigBird, Predicate.

None of them makes a len_q × len_k array: each says which tiles are empty or full and which of the partial
ones look alike.
"""

# ruff: noqa: D102 (what the overriding methods do is documented once, in Mask)

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

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
from npattn.masks.interval import Window

if TYPE_CHECKING:
    from npattn.masks.grid import Grid


class _Cross(Mask):
    """Visible iff i or j is marked: whole rows and whole columns."""

    def _marked(self, index: Array) -> Array:
        raise NotImplementedError

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self._marked(i) | self._marked(j)

    def _patterns(self, grid: "Grid") -> Any:
        """Marks of each row tile and each column tile: (count, size, pattern number)."""

        def make() -> Any:
            return (
                grid.patterns(self._marked(np.arange(grid.extent.len_q)), grid.tile_q),
                grid.patterns(self._marked(np.arange(grid.extent.len_k)), grid.tile_k),
            )

        return grid.remember(self, "patterns", make)

    def tile_class(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        from npattn.masks.grid import classify

        (count_q, size_q, _), (count_k, size_k, _) = self._patterns(grid)
        full = (count_q == size_q)[r] | (count_k == size_k)[c]
        some = (count_q > 0)[r] | (count_k > 0)[c]
        return classify(full, some)

    def signature(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> list[Array]:
        (_, _, pattern_q), (_, _, pattern_k) = self._patterns(grid)
        return [pattern_q[r], pattern_k[c]]


@dataclass(frozen=True, eq=False)
class GlobalTokens(_Cross):
    """Chosen tokens see everything and are seen by everyone: i or j among ``indices``.

    Parameters
    ----------
    indices : sequence of int
        Positions, as raw query and key indices; repeats and order do not matter.

    Raises
    ------
    ValueError
        From attention, when an index is beyond both len_q and len_k.

    Notes
    -----
    On its own no row is empty unless ``indices`` is, or all of them are beyond len_k. Usually joined with a
    `Window` (`longformer`).

    Examples
    --------
    >>> print(GlobalTokens([0, 3]).picture(5, 5))
    █████
    █··█·
    █··█·
    █████
    █··█·
    """

    indices: Any

    def __post_init__(self) -> None:
        indices = whole_numbers("GlobalTokens' indices", self.indices, least=0)
        object.__setattr__(self, "indices", tuple(sorted(set(indices))))

    def _marked(self, index: Array) -> Array:
        return np.isin(index, np.array(self.indices, np.int64))

    def check(self, extent: Extent) -> None:
        length = max(extent.len_q, extent.len_k)
        if self.indices and self.indices[-1] >= length > 0:
            raise ValueError(
                f"GlobalTokens' index {self.indices[-1]} is out of range: len_q is {extent.len_q}, "
                f"len_k is {extent.len_k}"
            )


@dataclass(frozen=True, eq=False)
class Strided(_Cross):
    """Every ``stride``-th token sees everything and is seen by everyone: i or j divisible by ``stride``.

    Parameters
    ----------
    stride : int >= 1
        Distance; token 0 is one of them.

    Notes
    -----
    No row is empty. `local_strided` adds the neighbourhood.

    Examples
    --------
    >>> print(Strided(3).picture(5, 7))
    ███████
    █··█··█
    █··█··█
    ███████
    █··█··█
    """

    stride: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", whole_number("Strided's stride", self.stride, least=1))

    def _marked(self, index: Array) -> Array:
        marked: Array = index % self.stride == 0
        return marked


@dataclass(frozen=True, eq=False)
class Dilated(Mask):
    """A window with holes: ``|i+offset−j| <= radius·dilation`` and divisible by ``dilation``.

    Parameters
    ----------
    radius : int >= 0
        How many keys on either side.
    dilation : int >= 1
        Distance between them; 1 is ``Window(radius, radius)``.
    offset : int, array of shape (batch,), or None
        As in `npattn.masks.Causal`: None is len_k − len_q.

    Notes
    -----
    With ``& Causal()`` only the past is left. Rows are empty where neither the own position nor one of the
    2·radius others exists among the keys.

    Examples
    --------
    >>> print(Dilated(1, 3, offset=0).picture(7, 7))
    █··█···
    ·█··█··
    ··█··█·
    █··█··█
    ·█··█··
    ··█··█·
    ···█··█
    """

    radius: int
    dilation: int
    offset: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", whole_number("Dilated's radius", self.radius, least=0))
        dilation = whole_number("Dilated's dilation", self.dilation, least=1)
        if dilation > FAR:
            raise ValueError(f"Dilated's dilation must be at most 2**61, got {dilation}")
        object.__setattr__(self, "dilation", dilation)
        if self.offset is not None:
            object.__setattr__(self, "offset", one_or_per_batch("offset", self.offset))

    def _band(self, extent: Extent) -> tuple[Array, Array, Array]:
        """First and last diagonal j − i, and their remainder modulo dilation; shape (batch or 1,)."""
        offset = extent.len_k - extent.len_q if self.offset is None else self.offset
        reach = self.radius * self.dilation
        offsets = offset if isinstance(offset, tuple) else (offset,)
        phase = np.array([number % self.dilation for number in offsets], np.int64)
        return per_batch(offset, -reach), per_batch(offset, reach), phase

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        first, last, phase = (take(part, b) for part in self._band(extent))
        diagonal = j - i
        visible: Array = (diagonal >= first) & (diagonal <= last) & ((diagonal - phase) % self.dilation == 0)
        return visible

    def intervals(self, extent: Extent) -> tuple[Array, Array] | None:
        if self.dilation > 1 and self.radius > 0:
            return None
        first, last, _ = self._band(extent)
        i = np.arange(extent.len_q)
        return as_intervals(i + first[:, None, None], i + last[:, None, None] + 1, extent.len_k)

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        return isinstance(self.offset, tuple), False

    def check(self, extent: Extent) -> None:
        check_batch("Dilated's offset", self.offset, extent)

    def tile_class(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        from npattn.masks.grid import classify

        first, last, phase = (take(part, b) for part in self._band(grid.extent))
        # The diagonals of a tile, and of them those within the band.
        low = np.maximum(c * grid.tile_k - np.minimum((r + 1) * grid.tile_q, grid.extent.len_q) + 1, first)
        high = np.minimum(np.minimum((c + 1) * grid.tile_k, grid.extent.len_k) - 1 - r * grid.tile_q, last)
        some = low + (phase - low) % self.dilation <= high
        return classify(np.zeros((1,) * r.ndim, bool), some)

    def signature(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> list[Array]:
        first, last, phase = (take(part, b) for part in self._band(grid.extent))
        corner = c * grid.tile_k - r * grid.tile_q
        inside = (corner - grid.tile_q + 1 >= first) & (corner + grid.tile_k - 1 <= last)
        # A tile wholly inside the band depends on the remainder alone, others also on where the band ends.
        ends = [
            np.where(inside, -1, np.clip(end - corner, -grid.tile_q, grid.tile_k)) for end in (first, last)
        ]
        return [inside.astype(np.int64), (corner - phase) % self.dilation, *ends]


class _Blocked(Mask):
    """Visible by blocks: layout[i // block_size, j // block_size]."""

    block_size: int

    def _layout(self, extent: Extent) -> Array:
        """Bool, (batch or 1, heads or 1, blocks along the queries, blocks along the keys)."""
        raise NotImplementedError

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        layout = self._layout(extent)
        visible: Array = layout[
            b if layout.shape[0] > 1 else 0,
            h if layout.shape[1] > 1 else 0,
            i // self.block_size,
            j // self.block_size,
        ]
        return visible

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        shape = self._layout(extent).shape
        return shape[0] > 1, shape[1] > 1

    def _ends(self, grid: "Grid", r: Array, c: Array) -> tuple[Array, Array, Array, Array]:
        """The blocks a tile touches: rows [r0, r1), columns [c0, c1)."""
        size = self.block_size
        r1 = (np.minimum((r + 1) * grid.tile_q, grid.extent.len_q) - 1) // size + 1
        c1 = (np.minimum((c + 1) * grid.tile_k, grid.extent.len_k) - 1) // size + 1
        return r * grid.tile_q // size, r1, c * grid.tile_k // size, c1

    def tile_class(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        from npattn.masks.grid import classify

        layout = self._layout(grid.extent)

        def summed() -> Array:
            """[..., r, y] is the number of visible blocks before column y in the block rows of tile row r."""
            starts, stops, _, _ = self._ends(grid, np.arange(grid.rows), np.zeros(1, np.int64))
            table = np.zeros((*layout.shape[:2], grid.rows, layout.shape[3] + 1), np.int32)
            for n, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                table[:, :, n, 1:] = np.count_nonzero(layout[:, :, start:stop], axis=2)
            return np.cumsum(table, axis=3, out=table)

        table = grid.remember(self, "summed", summed)
        b, h = b if layout.shape[0] > 1 else np.zeros_like(b), h if layout.shape[1] > 1 else np.zeros_like(h)
        r0, r1, c0, c1 = self._ends(grid, r, c)
        count = table[b, h, r, c1] - table[b, h, r, c0]
        return classify(count == (r1 - r0) * (c1 - c0), count > 0)

    def signature(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> list[Array]:
        layout = self._layout(grid.extent)
        size = self.block_size
        height, width = ((tile - 1 + size - 1) // size + 1 for tile in (grid.tile_q, grid.tile_k))
        r0, _, c0, _ = self._ends(grid, r, c)
        x = np.minimum(r0[:, None, None] + np.arange(height)[:, None], layout.shape[2] - 1)
        y = np.minimum(c0[:, None, None] + np.arange(width), layout.shape[3] - 1)
        b, h = b if layout.shape[0] > 1 else np.zeros_like(b), h if layout.shape[1] > 1 else np.zeros_like(h)

        def rows(part: slice) -> Array:
            blocks = layout[b[part, None, None], h[part, None, None], x[part], y[part]]
            return np.packbits(blocks.reshape(len(blocks), -1), axis=1)

        return [
            r * grid.tile_q % size,
            c * grid.tile_k % size,
            grid.number(rows, len(r), height * width),
        ]


@dataclass(frozen=True, eq=False)
class Blocks(_Blocked):
    """Visible by blocks: ``layout[i // block_size, j // block_size]``.

    Parameters
    ----------
    layout : bool array, shape (blocks_q, blocks_k), (heads, blocks_q, blocks_k) or (batch, heads, ...)
        Which blocks are visible; a heads or batch axis of length 1 is shared. Copied.
    block_size : int >= 1
        Queries and keys of a block.

    Raises
    ------
    TypeError
        When the layout is not bool.
    ValueError
        From attention, when the blocks do not cover len_q and len_k, or the heads are others.

    Notes
    -----
    Rows are empty where those of the layout are. The last blocks may reach beyond the lengths.

    Examples
    --------
    >>> print(Blocks(np.array([[True, False], [True, True]]), 3).picture(5, 6))
    ███···
    ███···
    ███···
    ██████
    ██████
    """

    layout: Any
    block_size: int

    def __post_init__(self) -> None:
        layout = np.asarray(self.layout)
        if layout.dtype != np.bool_:
            raise TypeError(f"Blocks' layout must be bool (True = visible), got dtype {layout.dtype}")
        if not 2 <= layout.ndim <= 4:
            raise ValueError(
                f"Blocks' layout must have shape (blocks_q, blocks_k), heads and batch before if wanted, "
                f"got {layout.shape}"
            )
        layout = np.array(layout, order="C").reshape((1,) * (4 - layout.ndim) + layout.shape)
        layout.flags.writeable = False
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "block_size", whole_number("Blocks' block_size", self.block_size, least=1))

    def _layout(self, extent: Extent) -> Array:
        layout: Array = self.layout
        return layout

    def _identity(self) -> tuple[Any, ...]:
        return self.layout.shape, self.layout.tobytes(), self.block_size

    def check(self, extent: Extent) -> None:
        for axis, name in ((2, "len_q"), (3, "len_k")):
            covered = self.layout.shape[axis] * self.block_size
            if covered < extent[axis]:
                raise ValueError(
                    f"Blocks' layout of {self.layout.shape[axis]} blocks of {self.block_size} covers "
                    f"{covered} along {name}, which is {extent[axis]}"
                )
        for axis, name in ((0, "batch"), (1, "heads")):
            if self.layout.shape[axis] not in (1, extent[axis]):
                raise ValueError(
                    f"Blocks' layout has {self.layout.shape[axis]} along {name}, must be 1 or {extent[axis]}"
                )

    def __repr__(self) -> str:
        return f"Blocks(<layout of shape {self.layout.shape}>, block_size={self.block_size})"


@dataclass(frozen=True, eq=False)
class BigBird(_Blocked):
    """Window, global and random blocks, for whatever lengths the call has. Made by `bigbird`.

    Parameters
    ----------
    block_size : int >= 1
        Queries and keys of a block.
    window_blocks : int >= 0
        Blocks of the window: ``|r − c| <= window_blocks // 2``; 0 is no window.
    global_blocks : int >= 0
        The first so many blocks see and are seen by all.
    random_blocks : int >= 0
        Further blocks that each row of blocks sees.
    seed : int >= 0
        Decides which.

    Examples
    --------
    >>> print(BigBird(2, 1, 1, 0, seed=0).picture(8, 8))
    ████████
    ████████
    ████····
    ████····
    ██··██··
    ██··██··
    ██····██
    ██····██
    """

    block_size: int
    window_blocks: int
    global_blocks: int
    random_blocks: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("block_size", "window_blocks", "global_blocks", "random_blocks", "seed"):
            least = 1 if name == "block_size" else 0
            object.__setattr__(
                self, name, whole_number(f"bigbird's {name}", getattr(self, name), least=least)
            )

    def _layout(self, extent: Extent) -> Array:
        rows, cols = -(-extent.len_q // self.block_size), -(-extent.len_k // self.block_size)
        return _bigbird_layout(
            rows, cols, self.window_blocks, self.global_blocks, self.random_blocks, self.seed
        )


@lru_cache(maxsize=8)
def _bigbird_layout(rows: int, cols: int, window: int, globals_: int, random: int, seed: int) -> Array:
    """Bool (1, 1, rows, cols)."""
    r, c = np.ogrid[:rows, :cols]
    layout = (np.abs(r - c) <= window // 2) if window else np.zeros((rows, cols), bool)
    layout |= (r < globals_) | (c < globals_)
    if random and layout.size:
        # The blocks with the smallest random numbers, among those not visible yet.
        number = np.random.default_rng(seed).random((rows, cols))
        number[layout] = 2.0
        count = min(random, cols)
        chosen = np.argpartition(number, count - 1, axis=1)[:, :count]
        layout[np.arange(rows)[:, None], chosen] = True
    layout = layout.reshape(1, 1, rows, cols)
    layout.flags.writeable = False
    return layout


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


def longformer(radius: int, global_indices: Any) -> Mask:
    """Longformer's mask: a window of ``radius`` keys on either side, and global tokens.

    Parameters
    ----------
    radius : int
        ``|i − j| <= radius`` is visible.
    global_indices : sequence of int
        Tokens that see and are seen by all; may be empty.

    Returns
    -------
    Mask
        ``Window(radius, radius, offset=0) | GlobalTokens(global_indices)``. No row is empty when len_q <=
        len_k.

    References
    ----------
    .. [1] Beltagy, Peters, Cohan, "Longformer: The Long-Document Transformer", 2020, section 3.1.

    Examples
    --------
    >>> print(longformer(1, [0]).picture(6, 6))
    ██████
    ███···
    ████··
    █·███·
    █··███
    █···██
    """
    return Window(radius, radius, offset=0) | GlobalTokens(global_indices)


def bigbird(block_size: int, window_blocks: int, global_blocks: int, random_blocks: int, seed: int) -> Mask:
    """BigBird's mask: blocks near the diagonal, global blocks and random blocks.

    Parameters
    ----------
    block_size : int
        Queries and keys of a block.
    window_blocks : int
        Blocks of the window, its middle included: ``|r − c| <= window_blocks // 2``; 0 is no window.
    global_blocks : int
        The first so many blocks see and are seen by all.
    random_blocks : int
        How many further blocks each row of blocks sees; fewer where there are no more.
    seed : int
        Decides the random ones, together with the number of blocks.

    Returns
    -------
    Mask
        The same blocks for every batch element and head. No row is empty as long as one of the three numbers
        is positive and the lengths are equal.

    Notes
    -----
    Keeps one bool per block, (len_q / block_size) × (len_k / block_size).

    References
    ----------
    .. [1] Zaheer et al., "Big Bird: Transformers for Longer Sequences", NeurIPS 2020, section 2.

    Examples
    --------
    >>> print(bigbird(1, 3, 1, 1, seed=0).picture(8, 8))
    ████████
    ████····
    █████···
    █████···
    █··███·█
    ██··███·
    █··█·███
    █··█··██
    """
    return BigBird(block_size, window_blocks, global_blocks, random_blocks, seed)


def local_strided(window_size: int, stride: int) -> Mask:
    """A neighbourhood and every ``stride``-th token: ``|i − j| <= window_size // 2``, or i or j divisible.

    Parameters
    ----------
    window_size : int
        Width of the neighbourhood.
    stride : int
        Distance of the tokens that see and are seen by all.

    Returns
    -------
    Mask
        ``Window(window_size // 2, window_size // 2, offset=0) | Strided(stride)``. No row is empty.

    References
    ----------
    .. [1] After Child et al., "Generating Long Sequences with Sparse Transformers", 2019.

    Examples
    --------
    >>> print(local_strided(2, 4).picture(8, 8))
    ████████
    ███·█···
    █████···
    █·███···
    ████████
    █···███·
    █···████
    █···█·██
    """
    half = whole_number("local_strided's window_size", window_size, least=0) // 2
    return Window(half, half, offset=0) | Strided(stride)


__all__ = [
    "BigBird",
    "Blocks",
    "Dilated",
    "GlobalTokens",
    "Predicate",
    "Strided",
    "bigbird",
    "local_strided",
    "longformer",
]
