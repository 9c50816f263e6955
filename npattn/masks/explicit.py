"""Masks given entry by entry: Dense (a bool array) and Sparse (CSR, e.g. a graph)."""

# ruff: noqa: D102 (what the overriding methods do is documented once, in Mask)

from typing import TYPE_CHECKING, Any

import numpy as np

from npattn._arrays import is_cupy
from npattn._typing import Array
from npattn.masks.base import Extent, Mask

if TYPE_CHECKING:
    from npattn.masks.grid import Grid


class Dense(Mask):
    """A bool array: True where the query may attend to the key.

    Parameters
    ----------
    array : bool array, 0 to 4 axes
        Read right-aligned as (batch, heads, len_q, len_k), axes of length 1 broadcast, as NumPy does. It is
        copied, as bits: an eighth of its size. An array on a GPU is copied to the host.

    Raises
    ------
    TypeError
        When the array is not bool. An integer array could mean indices, counts or 0/1; a float array is a
        bias.
    ValueError
        When it has more than four axes; and, from attention, when an axis is neither 1 nor the call's.

    Notes
    -----
    Rows are empty where the array's are. If every row of the array is one interval (a causal or a padding
    mask), the plan is as small and as fast as that of the interval mask.

    Examples
    --------
    >>> mask = Dense(np.array([[True, False, True], [False, False, False]]))
    >>> print(mask.picture(2, 3))
    █·█
    ···
    """

    def __init__(self, array: Any) -> None:
        if not hasattr(array, "dtype"):
            array = np.asarray(array)
        if array.dtype != np.bool_:
            hint = (
                "pass a float array as bias="
                if array.dtype.kind == "f"
                else "write array != 0 or array.astype(bool)"
            )
            raise TypeError(f"Dense takes a bool array (True = may attend), got dtype {array.dtype}: {hint}")
        if array.ndim > 4:
            raise ValueError(
                f"Dense takes at most 4 axes (batch, heads, len_q, len_k), got shape {tuple(array.shape)}"
            )
        if is_cupy(array):
            array = array.get()
        shape = (1,) * (4 - array.ndim) + tuple(array.shape)
        packed = np.packbits(array.reshape(shape), axis=-1, bitorder="little")
        packed.flags.writeable = False
        self.__dict__["shape"] = shape
        self.__dict__["_packed"] = packed

    shape: tuple[int, int, int, int]
    _packed: Array

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("masks are immutable: make a new Dense")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("masks are immutable: make a new Dense")

    def _identity(self) -> tuple[Any, ...]:
        return self.shape, self._packed.tobytes()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._packed.nbytes

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        index = [part if size > 1 else 0 for part, size in zip((b, h, i), self.shape[:3], strict=True)]
        if self.shape[3] == 1:
            return np.asarray(self._packed[(*index, np.zeros((1,) * j.ndim, np.intp))] & 1).astype(bool)
        visible: Array = (self._packed[(*index, j >> 3)] >> (j & 7).astype(np.uint8)) & 1
        return visible.astype(bool)

    def intervals(self, extent: Extent) -> tuple[Array, Array] | None:
        """One interval per row, if that is what the array's rows are."""
        visible = self._unpacked()
        length = visible.shape[-1]
        if length == 0 or visible.size == 0:
            lo = np.zeros((1, 1, extent.len_q), np.int64)
            return lo, lo.copy()
        count = np.count_nonzero(visible, axis=-1)
        lo = visible.argmax(axis=-1)
        hi = length - visible[..., ::-1].argmax(axis=-1)
        nothing = count == 0
        lo[nothing] = 0
        hi[nothing] = 0
        if np.any(hi - lo != count):
            return None
        if length == 1:
            hi = hi * extent.len_k
        shape = (*lo.shape[:2], extent.len_q)
        return np.broadcast_to(lo, shape), np.broadcast_to(hi, shape)

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        return self.shape[0] > 1, self.shape[1] > 1

    def check(self, extent: Extent) -> None:
        for axis, name in enumerate(Extent._fields):
            if self.shape[axis] not in (1, extent[axis]):
                raise ValueError(
                    f"Dense mask of shape {self.shape} does not fit {tuple(extent)} "
                    f"(batch, heads, len_q, len_k): its {name} axis is {self.shape[axis]}, "
                    f"must be 1 or {extent[axis]}"
                )

    def signature(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> list[Array]:
        parts = zip((b, h, r, c), self.shape, strict=True)
        return [part for part, size in parts if size > 1]

    def bitmaps(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array | None:
        _, _, rows, length = self.shape
        if rows == 1 or length == 1:
            return None  # few distinct tiles: look at one of each
        picked: Array = self._tiles(grid)[b if self.shape[0] > 1 else 0, h if self.shape[1] > 1 else 0, r, c]
        return picked

    def tile_class(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        from npattn.masks.grid import EMPTY, PARTIAL

        if self.shape[2] == 1 or self.shape[3] == 1:
            return np.full((1,) * r.ndim, PARTIAL, np.int8)
        anything = grid.remember(self, "any", lambda: self._tiles(grid).any(axis=(4, 5)))
        some = anything[b if self.shape[0] > 1 else 0, h if self.shape[1] > 1 else 0, r, c]
        return np.where(some, PARTIAL, EMPTY).astype(np.int8)

    def _tiles(self, grid: "Grid") -> Array:
        """The bits of every tile, (batch or 1, heads or 1, rows, cols, tile_q, tile_k // 32) uint32."""

        def cut() -> Array:
            tile_q, words = grid.tile_q, grid.tile_k // 32
            padded = np.zeros((*self.shape[:2], grid.rows * tile_q, grid.cols * words * 4), np.uint8)
            padded[:, :, : self.shape[2], : self._packed.shape[-1]] = self._packed
            whole = padded.view(np.dtype("<u4")).astype(np.uint32, copy=False)
            whole = whole.reshape(*self.shape[:2], grid.rows, tile_q, grid.cols, words)
            return np.ascontiguousarray(whole.swapaxes(3, 4))

        tiles: Array = grid.remember(self, "tiles", cut)
        return tiles

    def _unpacked(self) -> Array:
        return np.unpackbits(self._packed, axis=-1, count=self.shape[3], bitorder="little").view(bool)

    def __repr__(self) -> str:
        return f"Dense(<bool array of shape {self.shape}>)"


__all__ = ["Dense"]
