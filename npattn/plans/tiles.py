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

from typing import Any, Final, NamedTuple

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
