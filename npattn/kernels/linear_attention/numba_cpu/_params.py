# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""What a kernel of linear attention is told, as one record; and constants they share."""

from typing import Final, NamedTuple

import numba
import numpy as np

from npattn.kernels._simd.vectors import record_reader

CHUNK: Final = 16  # rows of a chunk; a multiple of the lanes
STRIP: Final = 12  # rows; two register tiles
BLOCK: Final = 256  # rows that ``apply_units`` and the like take at a time

#: What happens to an operand while it is loaded, and to a result while it is stored (times the slope).
PLAIN, ELU1, RELU = 0, 1, 2
#: Operands of the backward pass: with a column of ones behind them; the rows of dboth, out of dout.
ONE, BOTH = 3, 4


class Call(NamedTuple):
    """What a kernel is told; addresses and strides in bytes, an array's by batch element, head, row."""

    a: int
    a_b: int
    a_h: int
    a_i: int
    a_kind: int
    a_dim: int  # of the array: without the column of ONE or BOTH
    a_heads: int  # of one pair: 1, or the group where c_heads is 1
    b: int
    b_b: int
    b_h: int
    b_i: int
    b_kind: int
    b_dim: int
    c: int
    c_b: int
    c_h: int
    c_i: int
    c_kind: int
    c_dim: int
    c_heads: int  # of b and c
    e: int  # what BOTH reads beside dout: out
    e_b: int
    e_h: int
    e_i: int
    out: int
    out_b: int
    out_h: int
    out_i: int
    y: int  # φ' there multiplies the result
    y_b: int
    y_h: int
    y_i: int
    slope: int
    inverse: int  # 1 / total of the query heads' rows: written with ``normalise``, read by BOTH
    inverse_b: int
    inverse_h: int
    inverse_i: int
    normalise: int
    b_scaled: int  # whether b is multiplied by it (BOTH is in any case)
    dim: int  # of a and b, the column of ONE or BOTH included
    pairs: int
    heads: int  # pairs of one batch element
    rows: int  # of a and out
    length: int  # of b and c
    segments: int
    segment_rows: int
    states: int  # (pairs, segments, dim * padded dim_c + padded dim)
    state_bytes: int
    keeps_state: int
    eps: float


NAMES: Final = Call._fields
LAYOUT: Final = f"{len(NAMES) - 1}qd"
call_at = record_reader(
    numba.from_dtype(np.dtype([(name, np.float64 if name == "eps" else np.int64) for name in NAMES]))
)

__all__ = ["BLOCK", "BOTH", "CHUNK", "ELU1", "LAYOUT", "ONE", "PLAIN", "RELU", "STRIP", "Call", "call_at"]
