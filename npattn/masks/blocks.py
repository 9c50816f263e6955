"""Masks that are visible by blocks: Blocks, BigBird."""

# ruff: noqa: D102 (what the overriding methods do is documented once, in Mask)

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from npattn._typing import Array
from npattn.masks._arguments import whole_number
from npattn.masks.base import Extent, Mask

if TYPE_CHECKING:
    from npattn.masks.grid import Grid


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


__all__ = ["BigBird", "Blocks"]
