"""Masks given entry by entry: Dense (a bool array) and Sparse (CSR, e.g. a graph)."""

# ruff: noqa: D102 (what the overriding methods do is documented once, in Mask)

from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

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
        content = packed.tobytes()  # kept as bytes, which compare quickly and remember their hash
        self.__dict__["shape"] = shape
        self.__dict__["_content"] = content
        self.__dict__["_packed"] = np.frombuffer(content, np.uint8).reshape(packed.shape)

    shape: tuple[int, int, int, int]
    _content: bytes
    _packed: Array

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("masks are immutable: make a new Dense")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("masks are immutable: make a new Dense")

    def _identity(self) -> tuple[Any, ...]:
        return self.shape, self._content

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

    def bitmaps(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        if self.shape[2] == 1 or self.shape[3] == 1:
            return grid.look(self, b, h, r, c)  # few distinct tiles
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


@dataclass(frozen=True, eq=False)
class Sparse(Mask):
    """The stored entries of a sparse matrix: query i sees key j iff entry (i, j) is stored.

    Parameters
    ----------
    csr : scipy.sparse array or matrix, or anything with ``indptr``, ``indices`` and ``shape``
        Of shape (len_q, len_k). Formats other than CSR are converted by their own ``tocsr``. Explicit zeros
        count as stored; duplicates count once. Copied.

    Raises
    ------
    TypeError
        When it is no sparse matrix.
    ValueError
        When indptr and indices do not make a CSR matrix of that shape; and, from attention, when the shape
        is not (len_q, len_k).

    Notes
    -----
    Rows are empty where the matrix's are. Plans store a bitmap for each tile with an entry, so that a graph
    whose edges lie scattered costs a tile for almost every edge: `npattn.graph_attention` walks single edges
    instead.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> csr = SimpleNamespace(indptr=np.array([0, 2, 2, 3]), indices=np.array([0, 3, 1]), shape=(3, 4))
    >>> print(Sparse(csr).picture(3, 4))
    █··█
    ····
    ·█··
    """

    csr: InitVar[Any]
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self, csr: Any) -> None:
        if getattr(csr, "format", "csr") != "csr" and hasattr(csr, "tocsr"):
            csr = csr.tocsr()
        if not all(hasattr(csr, name) for name in ("indptr", "indices", "shape")):
            raise TypeError(
                f"Sparse takes a CSR matrix (indptr, indices, shape), got {type(csr).__name__}: "
                f"use Dense for arrays"
            )
        if len(csr.shape) != 2:
            raise ValueError(f"Sparse takes a matrix of two axes, got shape {tuple(csr.shape)}")
        rows, cols = (int(size) for size in csr.shape)
        indptr, indices = np.asarray(csr.indptr), np.asarray(csr.indices)
        if indptr.ndim != 1 or indices.ndim != 1 or indptr.dtype.kind not in "iu":
            raise ValueError("Sparse: indptr and indices must be arrays of ints with one axis")
        if len(indices) and indices.dtype.kind not in "iu":
            raise ValueError(f"Sparse: indices must be ints, got dtype {indices.dtype}")
        if len(indptr) != rows + 1 or indptr[0] != 0 or np.any(np.diff(indptr) < 0):
            raise ValueError(
                f"Sparse: indptr must ascend from 0 and have len_q + 1 = {rows + 1} entries, "
                f"got {len(indptr)}"
            )
        indices = indices[: int(indptr[-1])].astype(np.int64)
        if len(indices) != indptr[-1]:
            raise ValueError(f"Sparse: indptr ends at {indptr[-1]}, but there are {len(indices)} indices")
        if len(indices) and not (indices.min() >= 0 and indices.max() < cols):
            raise ValueError(
                f"Sparse: column indices must be in [0, {cols}), got {indices.min()} to {indices.max()}"
            )
        # Entries as i * cols + j, ascending, each once.
        entries = np.unique(np.repeat(np.arange(rows) * cols, np.diff(indptr)) + indices)
        entries.flags.writeable = False
        object.__setattr__(self, "shape", (rows, cols))
        object.__setattr__(self, "_entries", entries)

    _entries: ClassVar[Array]  # set per instance; not a field

    def _identity(self) -> tuple[Any, ...]:
        return self.shape, self._entries.tobytes()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._entries.nbytes

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        if not len(self._entries):
            return np.zeros((1,) * max(i.ndim, j.ndim), bool)
        wanted = i * self.shape[1] + j
        place = np.minimum(np.searchsorted(self._entries, wanted), len(self._entries) - 1)
        found: Array = self._entries[place] == wanted
        return found

    def intervals(self, extent: Extent) -> tuple[Array, Array] | None:
        """One interval per row, if that is what the entries of a row are."""
        rows, cols = self.shape
        starts = np.searchsorted(self._entries, np.arange(rows + 1) * cols)
        count = np.diff(starts)
        some = count > 0
        lo, hi = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        base = np.flatnonzero(some) * cols
        lo[some] = self._entries[starts[:-1][some]] - base
        hi[some] = self._entries[starts[1:][some] - 1] - base + 1
        if np.any(hi - lo != count):
            return None
        return lo.reshape(1, 1, -1), hi.reshape(1, 1, -1)

    def check(self, extent: Extent) -> None:
        if self.shape != (extent.len_q, extent.len_k):
            raise ValueError(
                f"Sparse mask of shape {self.shape} does not fit (len_q, len_k) = "
                f"{(extent.len_q, extent.len_k)}"
            )

    def tile_class(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        from npattn.masks.grid import EMPTY, PARTIAL

        def tiles_with_entries() -> Array:
            some = np.zeros((grid.rows, grid.cols), bool)
            i, j = np.divmod(self._entries, max(self.shape[1], 1))
            some[i // grid.tile_q, j // grid.tile_k] = True
            return some

        some = grid.remember(self, "some", tiles_with_entries)
        return np.where(some[r, c], PARTIAL, EMPTY).astype(np.int8)

    def signature(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> list[Array]:
        return [r * grid.cols + c]

    def bitmaps(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        words = grid.tile_k // 32
        wanted = r * grid.cols + c
        tiles, place_of = np.unique(wanted, return_inverse=True)
        out = np.zeros((len(tiles), grid.tile_q, words), np.uint32)
        i, j = np.divmod(self._entries, max(self.shape[1], 1))
        tile = (i // grid.tile_q) * grid.cols + j // grid.tile_k
        place = np.minimum(np.searchsorted(tiles, tile), len(tiles) - 1)
        hit = tiles[place] == tile
        i, j, place = i[hit], j[hit], place[hit]
        bit = np.uint32(1) << (j % 32).astype(np.uint32)
        np.bitwise_or.at(out, (place, i % grid.tile_q, j % grid.tile_k // 32), bit)
        return out[place_of]

    def __repr__(self) -> str:
        return f"Sparse(<{self.shape[0]} x {self.shape[1]}, {len(self._entries)} entries>)"


__all__ = ["Dense", "Sparse"]
