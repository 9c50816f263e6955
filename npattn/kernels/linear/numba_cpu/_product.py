# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False
"""``C = Σ A · B`` and what follows, float32, any strides: the products of a layer, forward and backward.

Products that do not wait for each other are one call: a projection's dx and dweight, the three projections of
attention, whose dx is one sum of three terms. A C is cut into units of rows and columns, each computed by one
thread from first to last: it walks the terms and their inner axes in blocks of DEPTH; packs the block of B,
transposed if it lies so, into panels as wide as the register tile, a quarter of the second-level cache in
all; and sends CHUNK rows after the other past all panels. The register tile (`_simd.matmul`) reads A where it
is, at any strides: one scalar at a time costs the same along rows and along columns. An element is summed
over one block of DEPTH at a time, whatever the unit around it: results depend neither on the number of
threads nor on the other rows.

What follows a product is done to CHUNK rows when they are complete and still in the cache: a bias, a
residual, an activation or the slope of one. Columns that fill no vector are computed in a strip of scratch
and copied.

On two cores of a Zen 4 the products of nanoGPT's recipe (768 rows, 128 to 512 columns and deep) run at 217 to
227 GFLOP/s with operands in the cache, at 203 to 218 without, of 229; NumPy's BLAS at 195 to 205. Tried and
left: fetching the lines of C, or the next rows of A, ahead of time (nothing gained); all rows of a unit past
one panel after the other, so that a strip of 64 columns was finished at a time (its lines lie a power of two
apart and throw each other out of the cache: GELU behind the product cost more than a pass of its own).
"""

from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from npattn._typing import Array
from npattn.kernels import _team
from npattn.kernels._jit import address, jit
from npattn.kernels._parts import part
from npattn.kernels._simd import _host
from npattn.kernels._simd.activation import GELU, GELU_TANH, SILU, activated, slope
from npattn.kernels._simd.matmul import matmul
from npattn.kernels._simd.transpose import square
from npattn.kernels._simd.vectors import (
    add,
    lesser,
    load,
    load_int64,
    load_scalar,
    mul,
    store,
    store_scalar,
)

KINDS: Final = {None: 0, "gelu": GELU, "gelu_tanh": GELU_TANH, "silu": SILU}

F = np.float32
ONE = F(1)
LANES: Final = _host.lanes(32)
#: Columns of a panel: as wide as the register tile.
WIDTH: Final = LANES * _host.TILE_VECTORS

#: Elsewhere NumPy's BLAS may have more than vectors to multiply with (Apple's), or was not compared.
IS_FAST: Final = _host.IS_X86 and _host.WIDTH >= 8

DEPTH: Final = 512
#: Rows of a unit: a quarter of what there are, within these limits. Fewer rows pack B more often.
FEWEST_ROWS, MOST_ROWS = 66, 384

#: Rows that meet all panels, and are finished, together: a multiple of the register tile's.
CHUNK: Final = 48

#: Scratch of a unit: a packed block of B, a quarter of the second-level cache, then a strip of C.
PACKED: Final = 1 << 18
SCRATCH: Final = PACKED + 4 * WIDTH * MOST_ROWS

#: Words that describe a product (its first unit, C and its shape, that of a unit, what follows, where its
#: terms are described and how many they are), and those of a term.
FIRST, C, M, N, ROWS, COLUMNS, BIAS, ADDED, KIND, ACTED, SLOPE_AT, TERMS, COUNT = range(0, 8 * 13, 8)
A, A_ROW, A_COL, B, B_ROW, B_COL, K = range(0, 8 * 7, 8)
PRODUCT: Final = 8 * 13
TERM: Final = 8 * 7


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
def _add_rows(c, added, row_bytes, rows, columns):
    whole = columns - columns % LANES
    for r in range(rows):
        at, other = c + r * row_bytes, added + r * row_bytes
        for j in range(0, 4 * whole, 4 * LANES):
            store(at + j, add(load(at + j, ONE), load(other + j, ONE)))
        for j in range(4 * whole, 4 * columns, 4):
            store_scalar(at + j, load_scalar(at + j, ONE) + load_scalar(other + j, ONE))


@part(static=("is_silu", "approximate"))
def _activate(c, acted, row_bytes, rows, columns, is_silu, approximate):
    for r in range(rows):
        for j in range(r * row_bytes, r * row_bytes + 4 * columns, 4 * LANES):
            store(acted + j, activated(is_silu, approximate, load(c + j, ONE)))


@part(static=("is_silu", "approximate"))
def _multiply_by_slope(c, x, acted, row_bytes, rows, columns, is_silu, approximate):
    """C times the slope at x; the activation of x as well."""
    for r in range(rows):
        for j in range(r * row_bytes, r * row_bytes + 4 * columns, 4 * LANES):
            xj = load(x + j, ONE)
            store(c + j, mul(load(c + j, ONE), slope(is_silu, approximate, xj)))
            store(acted + j, activated(is_silu, approximate, xj))


@part()
def _finish(p, strip, offset, j, rows, columns):
    """What follows the product; ``offset``: of this part in C and in every array of its shape."""
    c, c_row = load_int64(p + C) + offset, 4 * load_int64(p + N)
    bias, added, kind = load_int64(p + BIAS), load_int64(p + ADDED), load_int64(p + KIND)
    if columns % LANES:
        ragged = columns % WIDTH
        _copy_strip(strip, c + 4 * (columns - ragged), c_row, rows, ragged)
    if bias:
        _add_bias(c, c_row, rows, columns, bias + 4 * j)
    if added:
        _add_rows(c, added + offset, c_row, rows, columns)
    acted, x = load_int64(p + ACTED) + offset, load_int64(p + SLOPE_AT)
    if x:
        x += offset
        if kind == SILU:
            _multiply_by_slope(c, x, acted, c_row, rows, columns, True, False)
        elif kind == GELU_TANH:
            _multiply_by_slope(c, x, acted, c_row, rows, columns, False, True)
        else:
            _multiply_by_slope(c, x, acted, c_row, rows, columns, False, False)
    elif kind == SILU:
        _activate(c, acted, c_row, rows, columns, True, False)
    elif kind == GELU_TANH:
        _activate(c, acted, c_row, rows, columns, False, True)
    elif kind == GELU:
        _activate(c, acted, c_row, rows, columns, False, False)


@part()
def _pack(b, b_row, b_col, columns, depth, to):
    """All panels of b, one behind the other."""
    for j in range(0, columns, WIDTH):
        width = lesser(WIDTH, columns - j)
        if b_col == 4:
            _pack_rows(b + 4 * j, b_row, width, depth, to + 4 * depth * j)
        else:
            _pack_columns(b + j * b_col, b_col, width, depth, to + 4 * depth * j)


@part()
def _unit(p, i, j, rows, columns, scratch):
    """C[i : i + rows, j : j + columns] of the product described at p."""
    c_row = 4 * load_int64(p + N)
    offset = i * c_row + 4 * j
    c, strip = load_int64(p + C) + offset, scratch + PACKED
    terms = load_int64(p + TERMS)
    last = terms + TERM * (load_int64(p + COUNT) - 1)
    for t in range(terms, last + 1, TERM):
        a_row, a_col = load_int64(t + A_ROW), load_int64(t + A_COL)
        b_row, b_col = load_int64(t + B_ROW), load_int64(t + B_COL)
        a, b = load_int64(t + A) + i * a_row, load_int64(t + B) + j * b_col
        depth = load_int64(t + K)
        for k in range(0, depth, DEPTH):
            count = lesser(DEPTH, depth - k)
            _pack(b + k * b_row, b_row, b_col, columns, count, scratch)
            more, complete = k + t > terms, t == last and k + DEPTH >= depth
            for r in range(0, rows, CHUNK):
                now = lesser(CHUNK, rows - r)
                at = a + k * a_col + r * a_row
                for q in range(0, columns, WIDTH):
                    width = lesser(WIDTH, columns - q)
                    to, to_row = c + r * c_row + 4 * q, c_row
                    if width % LANES:
                        to, to_row = strip + 4 * WIDTH * r, 4 * WIDTH
                    vectors, panel = (width + LANES - 1) // LANES, scratch + 4 * count * q
                    matmul(at, a_row, a_col, panel, 4 * WIDTH, to, to_row, now, vectors, count, more, ONE)
                if complete:
                    _finish(p, strip + 4 * WIDTH * r, offset + r * c_row, j, now, columns)


@part()
def _units(where, start, stop, scratch):
    p = where
    for unit in range(start, stop):
        while load_int64(p + PRODUCT + FIRST) <= unit:
            p += PRODUCT
        m, n = load_int64(p + M), load_int64(p + N)
        rows, columns = load_int64(p + ROWS), load_int64(p + COLUMNS)
        across = (n + columns - 1) // columns
        place = unit - load_int64(p + FIRST)
        i, j = place // across * rows, place % across * columns
        _unit(p, i, j, lesser(rows, m - i), lesser(columns, n - j), scratch)


@jit
def product_units(where, start, stop, scratch, one):
    """Units [start, stop) of the products described at ``where``, behind which the number of units stands."""
    _units(where, start, stop, scratch)


def products(sums: Sequence[Any]) -> list[Any]:
    """The result of each ``npattn.kernels.linear.Sum``."""
    results = []
    heads: list[int] = []
    terms: list[int] = []
    units = 0
    described = PRODUCT * len(sums) + 8
    for pairs, bias, added, kind, keep, slope_at in sums:
        m, n = len(pairs[0][0]), pairs[0][1].shape[1]
        c = np.empty((m, n), F)
        both = keep or slope_at is not None
        acted = np.empty((m, n), F) if both else c
        results.append((c, acted) if both else c)
        rows = min(MOST_ROWS, max(FEWEST_ROWS, (m + 3) // 4))
        depth = max(len(b) for _, b in pairs)
        columns = max(1, PACKED // (4 * min(DEPTH, depth) * WIDTH)) * WIDTH
        heads += [units, address(c), m, n, rows, columns, _or_0(bias), _or_0(added), KINDS[kind]]
        heads += [address(acted), _or_0(slope_at), described + 8 * len(terms), len(pairs)]
        for a, b in pairs:
            terms += [address(a), *a.strides, address(b), *b.strides, len(b)]
        units += -(-m // rows) * -(-n // columns)
    words = array("q", [*heads, units, *terms])
    where = words.buffer_info()[0]
    for index in range(len(sums)):
        words[(PRODUCT * index + TERMS) // 8] += where
    _team.run(product_units, where, units, units, SCRATCH)
    return results


def _or_0(x: Array | None) -> int:
    return 0 if x is None else address(x)


__all__ = ["IS_FAST", "products"]
