"""Mask: which query may see which key, as a rule and not as a matrix.

A mask is a value: immutable, hashable, equal to another of the same class with the same arguments. It knows
no lengths; an `Extent` brings them. Every mask answers one question, ``allowed``, and may answer two more so
that plans are built without asking it pair by pair:

- ``intervals``: the visible keys of every query, where these are one interval ``[lo, hi)``;
- ``tile_class`` and ``signature``: is a tile empty, full or partial, and which partial tiles look the same.
"""

# ruff: noqa: D102 (what the overriding methods do is documented once, in Mask)

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npattn._typing import Array

if TYPE_CHECKING:
    from npattn.masks.grid import Grid


class Extent(NamedTuple):
    """The sizes a mask is asked about."""

    batch: int
    heads: int  # query heads
    len_q: int
    len_k: int


class Mask:
    """Which query may see which key. True means: may attend.

    Subclasses are frozen dataclasses that define `allowed`, and, where they can, `intervals` or `tile_class`
    and `signature`. Masks compose with ``&`` (both), ``|`` (either) and ``~`` (not); a bool array beside a
    mask is read as `Dense`. Python's ``and``, ``or`` and ``not`` cannot be overloaded and raise.

    Examples
    --------
    >>> from npattn.masks import Causal, Window
    >>> mask = Causal() & Window(2, None)
    >>> print(mask.picture(5, 5))
    █····
    ██···
    ███··
    ·███·
    ··███
    >>> mask.density(5, 5)
    0.48
    >>> mask == Causal() & Window(2, None)
    True
    """

    __array_ufunc__ = None  # so that `array & mask` comes to __rand__ instead of going element by element

    #: Whether a plan may be kept and served again for an equal mask.
    cacheable = True

    # What a subclass says

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        """Whether query i of batch element b, head h sees key j.

        Parameters
        ----------
        extent : Extent
            The sizes of the call.
        b, h, i, j : int64 ndarray
            Indices in range, of shapes that broadcast against each other.

        Returns
        -------
        visible : bool ndarray
            Of a shape that broadcasts to that of the indices.
        """
        raise NotImplementedError

    def intervals(self, extent: Extent) -> tuple[Array, Array] | None:
        """The visible keys of each query as one interval, or None when they are not one.

        Returns
        -------
        lo, hi : int64 ndarray, shape (batch or 1, heads or 1, len_q)
            Query i sees ``lo <= j < hi``; ``0 <= lo <= hi <= len_k``; ``lo == hi == 0`` when it sees nothing.
        """
        return None

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        """Whether the mask differs between batch elements, and between heads."""
        return False, False

    def check(self, extent: Extent) -> None:
        """Raise ValueError when the mask was made for other sizes than ``extent``."""

    def tile_class(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        """EMPTY, PARTIAL or FULL (`npattn.masks.grid`) for the tiles (r, c); PARTIAL when in doubt.

        The index arrays broadcast against each other. The default asks `intervals`.
        """
        return grid.interval_class(self, b, h, r, c)

    def signature(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> list[Array]:
        """Integer columns such that equal columns mean equal pairs inside the tile.

        Index arrays are flat; the tiles are PARTIAL ones. The default compares the intervals of the tile's
        rows; without intervals every tile is a case of its own.
        """
        return grid.interval_signature(self, b, h, r, c)

    def bitmaps(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        """Packed bits of tiles, shape (n, tile_q, tile_k // 32) uint32; bits beyond len_q and len_k are 0.

        The default takes them from the intervals, or else asks `allowed`.
        """
        return grid.interval_bitmaps(self, b, h, r, c)

    # What everybody may ask

    def to_dense(self, len_q: int, len_k: int, batch: int = 1, heads: int = 1) -> Array:
        """The mask as a bool array.

        Parameters
        ----------
        len_q, len_k, batch, heads : int
            Sizes; ``heads`` counts query heads.

        Returns
        -------
        visible : bool ndarray, shape (batch, heads, len_q, len_k)
            True where the query may attend to the key.

        Raises
        ------
        ValueError
            When the mask was made for other sizes.

        Notes
        -----
        Memory batch · heads · len_q · len_k: for looking and testing. Attention never calls it, except for
        the oracle.

        Examples
        --------
        >>> from npattn.masks import Causal
        >>> Causal().to_dense(2, 3).astype(int)
        array([[[[1, 1, 0],
                 [1, 1, 1]]]])
        """
        extent = _extent(len_q, len_k, batch, heads)
        self.check(extent)
        b, h, i, j = np.ogrid[:batch, :heads, :len_q, :len_k]
        shape = (batch, heads, len_q, len_k)
        if 0 in shape:
            return np.zeros(shape, bool)
        return np.array(np.broadcast_to(self.allowed(extent, b, h, i, j), shape))

    def density(self, len_q: int, len_k: int, batch: int = 1, heads: int = 1) -> float:
        """The fraction of pairs that are visible; 0 when there are none.

        Never makes the matrix: interval masks cost O(len_q), others the evaluation of their partial tiles.

        Examples
        --------
        >>> from npattn.masks import Causal, Window
        >>> Causal().density(100, 100)
        0.505
        >>> round(Window(255).density(1_000_000, 1_000_000), 6)
        0.000256
        """
        from npattn.masks.grid import count_visible

        extent = _extent(len_q, len_k, batch, heads)
        pairs = batch * heads * len_q * len_k
        return count_visible(self, extent) / pairs if pairs else 0.0

    def picture(
        self,
        len_q: int,
        len_k: int,
        batch: int = 1,
        heads: int = 1,
        *,
        b: int = 0,
        h: int = 0,
        width: int = 64,
    ) -> str:
        """A text picture of one batch element and head: queries go down, keys to the right.

        Parameters
        ----------
        len_q, len_k, batch, heads : int
            Sizes of the call.
        b, h : int
            Which batch element and head to draw.
        width : int
            Beyond this many rows or columns one character stands for several pairs: ``█`` when all of them
            are visible, ``▒`` when some are, ``·`` when none is.

        Returns
        -------
        text : str
            Lines joined by newlines.

        Examples
        --------
        >>> from npattn.masks import Window
        >>> print(Window(1, 1).picture(4, 6))
        ·███··
        ··███·
        ···███
        ····██
        >>> print(Window(150).picture(400, 400, width=8))
        ▒·······
        █▒······
        ██▒·····
        ▒██▒····
        ·▒██▒···
        ··▒██▒··
        ···▒██▒·
        ····▒██▒
        """
        from npattn.masks.grid import draw

        return draw(self, _extent(len_q, len_k, batch, heads), b, h, width)

    # Composition

    def __and__(self, other: object) -> "Mask":
        return _compose(And, self, other)

    def __rand__(self, other: object) -> "Mask":
        return _compose(And, other, self)

    def __or__(self, other: object) -> "Mask":
        return _compose(Or, self, other)

    def __ror__(self, other: object) -> "Mask":
        return _compose(Or, other, self)

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask has no truth value: combine masks with & | ~ instead of `and`, `or`, `not`, "
            "and test for a missing one with `mask is None`"
        )

    # Identity

    def _identity(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in self.__dataclass_fields__])  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or hash(self) != hash(other):
            return False
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = hash((type(self).__name__, self._identity()))
            self.__dict__["_hash"] = known
        return known

    def __getstate__(self) -> dict[str, Any]:
        # A hash of strings is another one in another process.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}


@dataclass(frozen=True, eq=False)
class And(Mask):
    """Both masks: made by ``left & right``."""

    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        _share_cacheable(self, self.left, self.right)

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self.left.allowed(extent, b, h, i, j) & self.right.allowed(extent, b, h, i, j)

    def intervals(self, extent: Extent) -> tuple[Array, Array] | None:
        left, right = self.left.intervals(extent), self.right.intervals(extent)
        if left is None or right is None:
            return None
        return as_intervals(np.maximum(left[0], right[0]), np.minimum(left[1], right[1]), extent.len_k)

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        return _varies_either(self.left, self.right, extent)

    def check(self, extent: Extent) -> None:
        self.left.check(extent)
        self.right.check(extent)

    def tile_class(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        return np.minimum(self.left.tile_class(grid, b, h, r, c), self.right.tile_class(grid, b, h, r, c))

    def signature(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> list[Array]:
        return grid.part_signature(self.left, b, h, r, c) + grid.part_signature(self.right, b, h, r, c)

    def bitmaps(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        return self.left.bitmaps(grid, b, h, r, c) & self.right.bitmaps(grid, b, h, r, c)

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True, eq=False)
class Or(Mask):
    """Either mask: made by ``left | right``."""

    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        _share_cacheable(self, self.left, self.right)

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        return self.left.allowed(extent, b, h, i, j) | self.right.allowed(extent, b, h, i, j)

    def intervals(self, extent: Extent) -> tuple[Array, Array] | None:
        left, right = self.left.intervals(extent), self.right.intervals(extent)
        if left is None or right is None:
            return None
        (lo_a, hi_a), (lo_b, hi_b) = left, right
        only_a, only_b = lo_b == hi_b, lo_a == hi_a  # the other one is empty
        touching = np.maximum(lo_a, lo_b) <= np.minimum(hi_a, hi_b)
        if not np.all(touching | only_a | only_b):
            return None
        lo = np.where(only_a, lo_a, np.where(only_b, lo_b, np.minimum(lo_a, lo_b)))
        hi = np.where(only_a, hi_a, np.where(only_b, hi_b, np.maximum(hi_a, hi_b)))
        return lo, hi

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        return _varies_either(self.left, self.right, extent)

    def check(self, extent: Extent) -> None:
        self.left.check(extent)
        self.right.check(extent)

    def tile_class(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        return np.maximum(self.left.tile_class(grid, b, h, r, c), self.right.tile_class(grid, b, h, r, c))

    def signature(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> list[Array]:
        return grid.part_signature(self.left, b, h, r, c) + grid.part_signature(self.right, b, h, r, c)

    def bitmaps(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        return self.left.bitmaps(grid, b, h, r, c) | self.right.bitmaps(grid, b, h, r, c)

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """The other pairs: made by ``~mask``."""

    mask: Mask

    def __post_init__(self) -> None:
        _share_cacheable(self, self.mask)

    def allowed(self, extent: Extent, b: Array, h: Array, i: Array, j: Array) -> Array:
        return ~self.mask.allowed(extent, b, h, i, j)

    def intervals(self, extent: Extent) -> tuple[Array, Array] | None:
        inner = self.mask.intervals(extent)
        if inner is None:
            return None
        lo, hi = inner
        starts_at_0 = lo == 0  # also when empty
        if not np.all(starts_at_0 | (hi == extent.len_k)):
            return None
        return as_intervals(
            np.where(starts_at_0, hi, 0), np.where(starts_at_0, extent.len_k, lo), extent.len_k
        )

    def varies(self, extent: Extent) -> tuple[bool, bool]:
        return self.mask.varies(extent)

    def check(self, extent: Extent) -> None:
        self.mask.check(extent)

    def tile_class(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        return (2 - self.mask.tile_class(grid, b, h, r, c)).astype(np.int8)

    def signature(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> list[Array]:
        return self.mask.signature(grid, b, h, r, c)

    def bitmaps(self, grid: "Grid", b: Array, h: Array, r: Array, c: Array) -> Array:
        return grid.whole(r, c) & ~self.mask.bitmaps(grid, b, h, r, c)

    def __repr__(self) -> str:
        return f"~{self.mask!r}"


def as_intervals(lo: Array, hi: Array, len_k: int) -> tuple[Array, Array]:
    """Clip to [0, len_k]; rows that see nothing become [0, 0)."""
    lo, hi = np.broadcast_arrays(lo, hi)
    lo, hi = np.clip(lo, 0, len_k), np.clip(hi, 0, len_k)
    nothing = hi <= lo
    if nothing.any():
        lo[nothing] = 0
        hi[nothing] = 0
    return lo, hi


def _compose(kind: type[And] | type[Or], left: object, right: object) -> Mask:
    parts = []
    for part in (left, right):
        if isinstance(part, Mask):
            parts.append(part)
        elif hasattr(part, "dtype") and hasattr(part, "shape"):
            from npattn.masks.explicit import Dense

            parts.append(Dense(part))
        else:
            raise TypeError(
                f"a mask combines with another mask or a bool array, got {type(part).__name__}"
                + (": leave the missing mask out, or use Full()" if part is None else "")
            )
    return kind(*parts)


def _share_cacheable(composite: Mask, *parts: Mask) -> None:
    if not all(part.cacheable for part in parts):
        object.__setattr__(composite, "cacheable", False)


def _varies_either(left: Mask, right: Mask, extent: Extent) -> tuple[bool, bool]:
    (batch_a, heads_a), (batch_b, heads_b) = left.varies(extent), right.varies(extent)
    return batch_a or batch_b, heads_a or heads_b


def _extent(len_q: int, len_k: int, batch: int, heads: int) -> Extent:
    for name, size in (("len_q", len_q), ("len_k", len_k), ("batch", batch), ("heads", heads)):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
            raise TypeError(f"{name} must be an int, got {type(size).__name__}")
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    return Extent(int(batch), int(heads), int(len_q), int(len_k))


__all__ = ["And", "Extent", "Mask", "Not", "Or", "as_intervals"]
