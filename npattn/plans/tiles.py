"""TilePlan: which tiles of the len_q x len_k matrix hold a visible pair, and where to test inside them.

The matrix is cut into tiles of tile_q rows (queries) by tile_k columns (keys); the last row and column of
tiles may be cut off by len_q and len_k. Neighbouring tiles of one kind form a *span*, so that causal, window
and document plans stay O(len_q / tile_q) however long the sequence::

    for n in range(num_lists):                       # the different masks of one call
        for r in range(num_rows):                    # query tiles
            for s in range(row_ptr[n, r], row_ptr[n, r + 1]):
                for c in range(row_first[s], row_stop[s]):   # key tiles, ascending
                    if   row_kind[s] == FULL:     every pair of tile (r, c) is visible
                    elif row_kind[s] == INTERVAL: (i, j) is visible iff lo[n, i] <= j < hi[n, i]
                    elif row_kind[s] == BITS:     (i, j) is visible iff bit (j % tile_k) of
                                                  bits[row_bits[s], i % tile_q] is set

Batch element b, query head h uses list n = list_of[b % list_of.shape[0], h % list_of.shape[1]].

Invariants (``check_tile_plan`` asserts them): spans ascend within a row and do not overlap; tiles without a
visible pair are in no span; a FULL tile needs no test; the key-side lists (col_*) hold exactly the same tiles
seen from the other axis; ``plan_to_dense(plan)`` equals the mask's ``to_dense``.
"""

from typing import Final, NamedTuple

import numpy as np

from npattn._typing import Array

FULL: Final = 0
INTERVAL: Final = 1
BITS: Final = 2


class TilePlan(NamedTuple):
    """The tiles to visit, once by query (output, dQ) and once by key (dK, dV).

    All arrays are C-contiguous int32 and read-only, so that Numba sees one type.
    """

    len_q: int
    len_k: int
    tile_q: int
    tile_k: int  # a multiple of 32
    list_of: Array  # (batch or 1, heads or 1): list of each batch element and query head
    # by query
    row_ptr: Array  # (num_lists, num_rows + 1): spans of query tile r are row_ptr[n, r] .. row_ptr[n, r + 1]
    row_first: Array  # (row spans,): first key tile
    row_stop: Array  # (row spans,): one past the last key tile
    row_kind: Array  # (row spans,): FULL, INTERVAL or BITS
    row_bits: Array  # (row spans,): index into bits for BITS, else -1
    # by key: the transpose
    col_ptr: Array  # (num_lists, num_cols + 1)
    col_first: Array  # (col spans,): first query tile
    col_stop: Array  # (col spans,)
    col_kind: Array  # (col spans,)
    col_bits: Array  # (col spans,)
    # tests inside partial tiles
    lo: Array  # (num_lists, len_q): first visible key; (num_lists, 0) when no span is INTERVAL
    hi: Array  # (num_lists, len_q): one past the last visible key
    bits: Array  # (unique bitmaps, tile_q, tile_k // 32): bit j % 32 of word j // 32, as int32


def plan_to_dense(plan: TilePlan, batch: int = 1, heads: int = 1) -> Array:
    """The mask a plan stands for: the loop of the module's docstring, both walking directions compared.

    Parameters
    ----------
    plan : TilePlan
        Any plan.
    batch, heads : int
        Sizes of the call.

    Returns
    -------
    visible : bool ndarray, shape (batch, heads, len_q, len_k)
        True where a kernel that walks the plan computes a weight.

    Raises
    ------
    AssertionError
        When the lists by key hold other tiles than the lists by query.

    Examples
    --------
    >>> from npattn.masks import Causal, Extent
    >>> from npattn.plans.build import tile_plan
    >>> plan = tile_plan(Causal(), Extent(1, 1, 3, 5), 32, 32)
    >>> plan_to_dense(plan)[0, 0].astype(int)
    array([[1, 1, 1, 0, 0],
           [1, 1, 1, 1, 0],
           [1, 1, 1, 1, 1]])
    """
    by_list = []
    for n in range(len(plan.row_ptr)):
        by_row = _expand(plan, n, "row")
        by_col = _expand(plan, n, "col")
        if not np.array_equal(by_row, by_col):
            raise AssertionError(
                f"list {n}: the key-side lists are not the transpose of the query-side lists"
            )
        by_list.append(by_row)
    lists = plan.list_of[
        np.arange(batch)[:, None] % plan.list_of.shape[0], np.arange(heads) % plan.list_of.shape[1]
    ]
    dense = np.zeros((batch, heads, plan.len_q, plan.len_k), bool)
    for b in range(batch):
        for h in range(heads):
            dense[b, h] = by_list[lists[b, h]]
    return dense


def check_tile_plan(plan: TilePlan) -> None:
    """Assert every invariant of the module's docstring but the last, in time proportional to the plan.

    Raises
    ------
    AssertionError
        Naming the invariant.
    """
    rows, cols = num_rows(plan), num_cols(plan)
    assert plan.tile_k % 32 == 0, "tile_k must be a multiple of 32"
    for name, array in zip(plan._fields[4:], plan[4:], strict=True):
        assert isinstance(array, np.ndarray)
        assert array.dtype == np.int32, f"{name} must be int32"
        assert array.flags.c_contiguous, f"{name} must be C-contiguous"
        assert not array.flags.writeable, f"{name} must be read-only"
    lists = len(plan.row_ptr)
    assert plan.list_of.ndim == 2, "list_of must have two axes"
    assert plan.list_of.min(initial=0) >= 0, "list_of must not be negative"
    assert plan.list_of.max(initial=0) < lists, "list_of must name lists there are"
    assert plan.bits.shape[1:] == (plan.tile_q, plan.tile_k // 32), "bits: one bitmap per tile"
    assert plan.lo.shape == plan.hi.shape, "lo and hi go together"
    any_interval = bool((plan.row_kind == INTERVAL).any() or (plan.col_kind == INTERVAL).any())
    assert plan.lo.shape == (lists, plan.len_q if any_interval else 0), "lo is there iff a span is INTERVAL"
    assert np.all((plan.lo >= 0) & (plan.lo <= plan.hi) & (plan.hi <= plan.len_k)), "0 <= lo <= hi <= len_k"
    tiles = []
    for ptr, first, stop, kind, bits, count, width in (
        (plan.row_ptr, plan.row_first, plan.row_stop, plan.row_kind, plan.row_bits, rows, cols),
        (plan.col_ptr, plan.col_first, plan.col_stop, plan.col_kind, plan.col_bits, cols, rows),
    ):
        assert ptr.shape == (lists, count + 1), "one pointer per line of tiles, and the end"
        assert np.all(np.diff(ptr, axis=1) >= 0), "pointers must not descend"
        assert len(first) == len(stop) == len(kind) == len(bits), "spans have four fields"
        assert np.all(ptr[1:, 0] == ptr[:-1, -1]), "lists follow each other"
        assert ptr[0, 0] == 0, "the first span is span 0"
        assert ptr[-1, -1] == len(first), "every span belongs to a line"
        assert np.all((first >= 0) & (first < stop) & (stop <= width)), "a span holds at least one tile"
        line = np.repeat(np.arange(lists * count), np.diff(ptr, axis=1).reshape(-1))
        same_line = line[1:] == line[:-1]
        assert np.all((first[1:] >= stop[:-1]) | ~same_line), "spans ascend and do not overlap"
        assert np.all((kind == BITS) == (bits >= 0)), "row_bits is an index for BITS, else -1"
        assert bits.max(initial=-1) < len(plan.bits), "row_bits must name bitmaps there are"
        assert np.all(np.isin(kind, (FULL, INTERVAL, BITS))), "a kind is FULL, INTERVAL or BITS"
        code = kind.astype(np.int64) + 3 * (bits.astype(np.int64) + 1)
        tiles.append((line, first, stop, code))
    by_row, by_col = (_tile_list(*side) for side in tiles)
    # by_row: (list, row, col), by_col: (list, col, row); put both in the order of the former
    line, place, code = by_col
    row_line = line // max(cols, 1) * rows + place
    place = line % max(cols, 1)
    order = np.lexsort((place, row_line))
    same = all(np.array_equal(a, b[order]) for a, b in zip(by_row, (row_line, place, code), strict=True))
    assert same, "the key-side lists must be the transpose of the query-side lists"
    line, place, code = by_row
    if any_interval:
        n, r = np.divmod(line[code == INTERVAL], max(rows, 1))
        c = place[code == INTERVAL]
        for start in range(0, len(n), 4096):
            part = slice(start, start + 4096)
            i = r[part, None] * plan.tile_q + np.arange(plan.tile_q)
            inside = i < plan.len_q
            i = np.minimum(i, plan.len_q - 1)
            left = np.maximum(plan.lo[n[part, None], i], c[part, None] * plan.tile_k)
            right = np.minimum(plan.hi[n[part, None], i], (c[part, None] + 1) * plan.tile_k)
            seen = np.where(inside, np.maximum(right - left, 0), 0).sum(axis=1)
            assert np.all(seen > 0), "a tile without a visible pair must be in no span"


def num_rows(plan: TilePlan) -> int:
    """How many tiles of queries there are."""
    return -(-plan.len_q // plan.tile_q)


def num_cols(plan: TilePlan) -> int:
    """How many tiles of keys there are."""
    return -(-plan.len_k // plan.tile_k)


def plan_nbytes(plan: TilePlan) -> int:
    """Bytes the plan's arrays hold."""
    return sum(part.nbytes for part in plan if isinstance(part, np.ndarray))


def count_tiles(plan: TilePlan, batch: int = 1, heads: int = 1) -> dict[str, int]:
    """How many tiles a kernel visits over all batch elements and heads, and of which kind.

    Returns
    -------
    counts : dict
        ``full``, ``interval``, ``bits``: tiles in spans of that kind; ``total``: all tiles of the matrix,
        visited or not.

    Examples
    --------
    >>> from npattn.masks import Causal, Extent
    >>> from npattn.plans.build import tile_plan
    >>> count_tiles(tile_plan(Causal(), Extent(1, 1, 320, 320), 32, 32))
    {'full': 45, 'interval': 10, 'bits': 0, 'total': 100}
    """
    sizes = (plan.row_stop - plan.row_first).astype(np.int64)
    uses = np.bincount(
        plan.list_of[
            np.arange(batch)[:, None] % plan.list_of.shape[0], np.arange(heads) % plan.list_of.shape[1]
        ].reshape(-1),
        minlength=len(plan.row_ptr),
    )
    list_of_span = np.repeat(np.arange(len(plan.row_ptr)), plan.row_ptr[:, -1] - plan.row_ptr[:, 0])
    counts = {
        name: int((sizes * uses[list_of_span])[plan.row_kind == kind].sum())
        for name, kind in (("full", FULL), ("interval", INTERVAL), ("bits", BITS))
    }
    return {**counts, "total": num_rows(plan) * num_cols(plan) * batch * heads}


def picture(plan: TilePlan, b: int = 0, h: int = 0) -> str:
    """A text picture of the plan, one character per tile.

    ``█`` is FULL, ``◪`` INTERVAL, ``▒`` BITS, ``·`` a tile that is not visited.

    Examples
    --------
    >>> from npattn.masks import Extent, Window
    >>> from npattn.plans.build import tile_plan
    >>> print(picture(tile_plan(Window(100), Extent(1, 1, 320, 320), 32, 32)))
    ◪·········
    █◪········
    ██◪·······
    ◪██◪······
    ◪◪██◪·····
    ·◪◪██◪····
    ··◪◪██◪···
    ···◪◪██◪··
    ····◪◪██◪·
    ·····◪◪██◪
    """
    n = int(plan.list_of[b % plan.list_of.shape[0], h % plan.list_of.shape[1]])
    signs = np.full((num_rows(plan), num_cols(plan)), "·")
    for r in range(num_rows(plan)):
        for s in range(plan.row_ptr[n, r], plan.row_ptr[n, r + 1]):
            signs[r, plan.row_first[s] : plan.row_stop[s]] = "█◪▒"[plan.row_kind[s]]
    return "\n".join("".join(line) for line in signs)


def _tile_list(line: Array, first: Array, stop: Array, code: Array) -> tuple[Array, Array, Array]:
    """Spans written out: line, place along it, and code of every tile."""
    size = (stop - first).astype(np.int64)
    ends = np.cumsum(size)
    place = np.arange(int(size.sum())) - np.repeat(ends - size, size) + np.repeat(first, size)
    return np.repeat(line, size), place, np.repeat(code, size)


def _expand(plan: TilePlan, n: int, side: str) -> Array:
    """List n as a bool matrix, read from the lists by query ("row") or by key ("col")."""
    dense = np.zeros((num_rows(plan) * plan.tile_q, num_cols(plan) * plan.tile_k), bool)
    ptr, first, stop, kind, bits = (
        getattr(plan, f"{side}_{x}") for x in ("ptr", "first", "stop", "kind", "bits")
    )
    j = np.arange(plan.tile_k)
    for line in range(ptr.shape[1] - 1):
        for s in range(ptr[n, line], ptr[n, line + 1]):
            for other in range(first[s], stop[s]):
                r, c = (line, other) if side == "row" else (other, line)
                i = np.arange(r * plan.tile_q, min((r + 1) * plan.tile_q, plan.len_q))
                tile = dense[i[0] : i[0] + plan.tile_q, c * plan.tile_k : (c + 1) * plan.tile_k]
                if kind[s] == FULL:
                    tile[:] = True
                elif kind[s] == INTERVAL:
                    key = j + c * plan.tile_k
                    tile[: len(i)] = (plan.lo[n, i, None] <= key) & (key < plan.hi[n, i, None])
                else:
                    word = plan.bits[bits[s]].view(np.uint32)[:, j // 32]
                    tile[:] = (word >> (j % 32).astype(np.uint32)) & 1
    return dense[: plan.len_q, : plan.len_k]


__all__ = [
    "BITS",
    "FULL",
    "INTERVAL",
    "TilePlan",
    "check_tile_plan",
    "count_tiles",
    "num_cols",
    "num_rows",
    "picture",
    "plan_nbytes",
    "plan_to_dense",
]
