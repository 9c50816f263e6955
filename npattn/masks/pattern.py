"""Masks of scattered pairs: Dilated, Strided, GlobalTokens.

None of them makes a len_q × len_k array: each says which tiles are empty or full and which of the partial
ones look alike.
"""

# ruff: noqa: D102 (what the overriding methods do is documented once, in Mask)

from dataclasses import dataclass
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


__all__ = ["Dilated", "GlobalTokens", "Strided"]
