# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""``C = A · B + bias`` for float32 matrices of any strides: the products of a layer, forward and backward.

C is cut into units of up to ROWS rows and COLUMNS columns, each computed by one thread from first to last: it
walks the inner axis in blocks of DEPTH; packs the block of B, transposed if it lies so, into panels as wide
as the register tile, which then stay in the second-level cache for all its rows; and lets the register tile
(`_simd.matmul`) read A where it is, at any strides: one scalar at a time costs the same along rows and along
columns. An element is summed over one block of DEPTH at a time, whatever the unit around it: results depend
neither on the number of threads nor on the other rows.

Columns that fill no vector are computed in a strip of scratch and copied.
"""

from array import array
from typing import Final

import numpy as np

from npattn._typing import Array
from npattn.kernels import _team
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd import _host
from npattn.kernels._simd.matmul import matmul
from npattn.kernels._simd.transpose import square
from npattn.kernels._simd.vectors import add, lesser, load, load_int64, load_scalar, store, store_scalar

F = np.float32
ONE = F(1)
LANES: Final = _host.lanes(32)
#: Columns of a panel: as wide as the register tile.
WIDTH: Final = LANES * _host.TILE_VECTORS

#: Elsewhere NumPy's BLAS may have more than vectors to multiply with (Apple's), or was not compared.
IS_FAST: Final = _host.IS_X86 and _host.WIDTH >= 8

ROWS: Final = 384
COLUMNS: Final = 64
DEPTH: Final = 512

#: Scratch of a unit: a packed panel, then a strip of C.
PACKED: Final = 4 * WIDTH * DEPTH
SCRATCH: Final = PACKED + 4 * WIDTH * ROWS

A, A_ROW, A_COL, B, B_ROW, B_COL, C, C_ROW, M, N, K, BIAS = range(0, 8 * 12, 8)


@part()
def _pack_rows(b, b_row, columns, depth, to):
    """``to[k, :columns] = b[k, :columns]``, the rest of the panel's row 0."""
    whole = columns - columns % LANES
    for k in range(depth):
        source, target = b + k * b_row, to + 4 * WIDTH * k
        for j in range(0, whole, LANES):
            store(target + 4 * j, load(source + 4 * j, ONE))
        for j in range(whole, columns):
            store_scalar(target + 4 * j, load_scalar(source + 4 * j, ONE))
        for j in range(columns, WIDTH):
            store_scalar(target + 4 * j, F(0))


@part()
def _pack_columns(b, b_col, columns, depth, to):
    """The same where a column of b is contiguous, b_col bytes behind the one before."""
    whole_j, whole_k = columns - columns % LANES, depth - depth % LANES
    for j in range(0, whole_j, LANES):
        source, target = b + j * b_col, to + 4 * j
        for k in range(0, whole_k, LANES):
            square(source + 4 * k, b_col, target + 4 * WIDTH * k, 4 * WIDTH, ONE)
        for k in range(whole_k, depth):
            for i in range(LANES):
                store_scalar(target + 4 * WIDTH * k + 4 * i, load_scalar(source + i * b_col + 4 * k, ONE))
    for k in range(depth):
        for j in range(whole_j, columns):
            store_scalar(to + 4 * (WIDTH * k + j), load_scalar(b + j * b_col + 4 * k, ONE))
        for j in range(columns, WIDTH):
            store_scalar(to + 4 * (WIDTH * k + j), F(0))


@part()
def _copy_strip(strip, c, c_row, rows, columns):
    for r in range(rows):
        for j in range(columns):
            store_scalar(c + r * c_row + 4 * j, load_scalar(strip + 4 * (WIDTH * r + j), ONE))


@part()
def _add_bias(c, c_row, rows, columns, bias):
    whole = columns - columns % LANES
    for r in range(rows):
        row = c + r * c_row
        for j in range(0, whole, LANES):
            store(row + 4 * j, add(load(row + 4 * j, ONE), load(bias + 4 * j, ONE)))
        for j in range(whole, columns):
            store_scalar(row + 4 * j, load_scalar(row + 4 * j, ONE) + load_scalar(bias + 4 * j, ONE))


@part()
def _panel(where, i, j, rows, columns, scratch):
    """C[i : i + rows, j : j + columns], columns <= WIDTH."""
    a_row, a_col = load_int64(where + A_ROW), load_int64(where + A_COL)
    b_row, b_col = load_int64(where + B_ROW), load_int64(where + B_COL)
    c_row, depth = load_int64(where + C_ROW), load_int64(where + K)
    a, b = load_int64(where + A) + i * a_row, load_int64(where + B) + j * b_col
    c = load_int64(where + C) + i * c_row + 4 * j
    target, target_row = c, c_row
    if columns % LANES:
        target, target_row = scratch + PACKED, 4 * WIDTH
    vectors = (columns + LANES - 1) // LANES
    for k in range(0, depth, DEPTH):
        count = lesser(DEPTH, depth - k)
        if b_col == 4:
            _pack_rows(b + k * b_row, b_row, columns, count, scratch)
        else:
            _pack_columns(b + k * b_row, b_col, columns, count, scratch)
        at = a + k * a_col
        matmul(at, a_row, a_col, scratch, 4 * WIDTH, target, target_row, rows, vectors, count, k > 0, ONE)
    if columns % LANES:
        _copy_strip(target, c, c_row, rows, columns)
    bias = load_int64(where + BIAS)
    if bias:
        _add_bias(c, c_row, rows, columns, bias + 4 * j)


@part()
def _units(where, start, stop, scratch):
    m, n = load_int64(where + M), load_int64(where + N)
    blocks = (m + ROWS - 1) // ROWS
    for unit in range(start, stop):
        i, j = unit % blocks * ROWS, unit // blocks * COLUMNS
        end = lesser(j + COLUMNS, n)
        while j < end:
            _panel(where, i, j, lesser(ROWS, m - i), lesser(WIDTH, end - j), scratch)
            j += WIDTH


@jit
def product_units(where, start, stop, scratch, one):
    """Units [start, stop) of the product whose description is at ``where``."""
    _units(where, start, stop, scratch)


def product(a: Array, b: Array, bias: Array | None = None) -> Array:
    """``a @ b + bias``: a (m, k), b (k, n) with one contiguous axis, bias (n,) contiguous, all float32."""
    (m, k), n = a.shape, b.shape[1]
    c = np.empty((m, n), F)
    call = array(
        "q",
        (
            *(address(a), *a.strides, address(b), *b.strides, address(c), 4 * n, m, n, k),
            0 if bias is None else address(bias),
        ),
    )
    units = -(-m // ROWS) * -(-n // COLUMNS)
    _team.run(product_units, call.buffer_info()[0], units, units, SCRATCH)
    return c


__all__ = ["IS_FAST", "product"]
