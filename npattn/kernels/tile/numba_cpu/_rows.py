"""Moving rows between the caller's arrays and scratch: widened, transposed, rounded, checked."""

import numpy as np
from numba import types

from npattn.kernels._parts import part
from npattn.kernels._simd.storage import (
    load_bfloat,
    load_half,
    load_half_pair,
    load_scalar_bfloat,
    load_scalar_half,
    store_bfloat,
    store_half,
    store_pairs,
    store_rounded,
    store_rounded_pairs,
)
from npattn.kernels._simd.transpose import square, square_bfloat, square_half, square_pairs
from npattn.kernels._simd.vectors import (
    any_nan,
    cast,
    cast_int32,
    fma,
    keep_where_equal,
    lanes,
    load,
    load_int32,
    load_scalar,
    mul,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    sub,
    vector_bytes,
)


@part("one")
def element(address, kind, one):
    """One stored element (kind as in ``_params.storage_kind``), widened."""
    if kind == 1:
        return load_scalar_half(address, one)
    if kind == 2:
        return load_scalar_bfloat(address, one)
    return load_scalar(address, one)


@part(types.intp)
def element_bytes(kind, one):
    """Bytes of one stored element."""
    return scalar_bytes(one) if kind == 0 else 2


@part()
def copy_rows(source, source_row, target, target_row, rows, dim, kind, one):
    """Rows widened into scratch; each is padded with zeros to whole vectors."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    whole = dim // n * n
    zero = cast(0.0, one)
    for r in range(rows):
        s = source + r * source_row
        t = target + r * target_row
        if kind == 0:
            for c in range(whole // n):
                store(t + c * width, load(s + c * width, one))
        elif kind == 1:
            for c in range(whole // n):
                store(t + c * width, load_half(s + c * n * 2, one))
        else:
            for c in range(whole // n):
                store(t + c * width, load_bfloat(s + c * n * 2, one))
        if whole < dim:
            item = element_bytes(kind, one)
            for c in range(whole, whole + n):
                store_scalar(t + c * size, element(s + c * item, kind, one) if c < dim else zero)


@part()
def pack_transposed(source, source_row, target, target_row, rows, dim, factor, kind, one):
    """target[d, j] = factor * source[j, d]; columns are padded with zeros to whole vectors."""
    n = lanes(one)
    size = scalar_bytes(one)
    item = element_bytes(kind, one)
    whole = dim // n * n
    full = rows // n * n
    for j in range(0, full, n):
        s = source + j * source_row
        t = target + j * size
        for d in range(0, whole, n):
            if kind == 0:
                square(s + d * size, source_row, t + d * target_row, target_row, factor)
            elif kind == 1:
                square_half(s + d * 2, source_row, t + d * target_row, target_row, factor)
            else:
                square_bfloat(s + d * 2, source_row, t + d * target_row, target_row, factor)
        for d in range(whole, dim):
            for jj in range(n):
                value = element(s + jj * source_row + d * item, kind, one) * factor
                store_scalar(t + d * target_row + jj * size, value)
    if full < rows:
        zero = cast(0.0, one)
        for jj in range(full, full + n):
            s = source + jj * source_row
            t = target + jj * size
            for d in range(dim):
                value = element(s + d * item, kind, one) * factor if jj < rows else zero
                store_scalar(t + d * target_row, value)


@part()
def copy_pairs(source, source_row, target, target_row, rows, dim, one):
    """Rows of bfloat16 as they are, padded with a zero to whole pairs."""
    n = lanes(one)
    width = vector_bytes(one)
    whole = dim // (2 * n)
    for r in range(rows):
        s = source + r * source_row
        t = target + r * target_row
        for c in range(whole):
            store(t + c * width, load(s + c * width, one))  # moved, not computed with
        for c in range(whole * n, dim // 2):
            store_scalar(t + c * 4, load_int32(s + c * 4))
        if dim % 2 == 1:
            store_scalar(t + dim // 2 * 4, load_half_pair(s + (dim - 1) * 2))


@part()
def pack_pairs_transposed(source, source_row, target, target_row, rows, dim, one):
    """target[d, j] = the pair source[j, 2d], source[j, 2d + 1]; columns are padded to whole vectors."""
    n = lanes(one)
    pairs = (dim + 1) // 2
    whole = dim // 2 // n * n
    full = rows // n * n
    for j in range(0, full, n):
        for d in range(0, whole, n):
            square_pairs(
                source + j * source_row + d * 4, source_row, target + d * target_row + j * 4, target_row, one
            )
    padded = (rows + n - 1) // n * n
    for j in range(padded):
        first_pair = whole if j < full else 0
        for d in range(first_pair, pairs):
            at = target + d * target_row + j * 4
            if j >= rows:
                store_scalar(at, cast_int32(0))
            elif 2 * d + 1 < dim:
                store_scalar(at, load_int32(source + j * source_row + d * 4))
            else:
                store_scalar(at, load_half_pair(source + j * source_row + d * 4))


@part()
def pack_pairs_of_rows(source, source_row, target, target_row, rows, dim, one):
    """target[j, c] = the pair source[2j, c], source[2j + 1, c]; padded to whole vectors and pairs."""
    n = lanes(one)
    whole = dim // n * n
    for j in range((rows + 1) // 2):
        first = source + 2 * j * source_row
        second = first + source_row if 2 * j + 1 < rows else 0
        t = target + j * target_row
        for c in range(0, whole, n):
            store_pairs(first + c * 2, second + c * 2 if second != 0 else 0, t + c * 4, one)
        if whole < dim:
            for c in range(whole, whole + n):
                if c >= dim:
                    store_scalar(t + c * 4, cast_int32(0))
                elif second != 0:
                    pair = load_half_pair(first + c * 2) + load_half_pair(second + c * 2) * 65536
                    store_scalar(t + c * 4, cast_int32(pair))
                else:
                    store_scalar(t + c * 4, load_half_pair(first + c * 2))


@part()
def round_rows(source, target, row, target_row, rows, vectors, one):
    """Weights rounded to bfloat16, nearest even, into rows of their own."""
    n = lanes(one)
    width = vector_bytes(one)
    for r in range(rows):
        for c in range(vectors):
            store_rounded(target + r * target_row + c * n * 2, load(source + r * row + c * width, one))


@part()
def round_pairs_of_rows(source, row, target, target_row, rows, vectors, one):
    """target[r, c] = the pair source[2r, c], source[2r + 1, c] in bfloat16; a row missing at the end is 0."""
    width = vector_bytes(one)
    zeros = splat(cast(0.0, one))
    for r in range((rows + 1) // 2):
        first = source + 2 * r * row
        t = target + r * target_row
        if 2 * r + 1 < rows:
            for c in range(vectors):
                store_rounded_pairs(
                    t + c * width, load(first + c * width, one), load(first + row + c * width, one)
                )
        else:
            for c in range(vectors):
                store_rounded_pairs(t + c * width, load(first + c * width, one), zeros)


@part()
def store_row(source, target, dim, factor, kind, one):
    """One scratch row times ``factor``, rounded into the caller's array."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    whole = dim // n * n
    scale = splat(factor)
    if kind == 0:
        for c in range(whole // n):
            store(target + c * width, mul(load(source + c * width, one), scale))
        for c in range(whole, dim):
            store_scalar(target + c * size, load_scalar(source + c * size, one) * factor)
    elif kind == 1:
        for c in range(whole // n):
            store_half(target + c * n * 2, mul(load(source + c * width, one), scale))
        for c in range(whole, dim):
            store_half(target + c * 2, load_scalar(source + c * size, one) * factor)
    else:
        for c in range(whole // n):
            store_bfloat(target + c * n * 2, mul(load(source + c * width, one), scale))
        for c in range(whole, dim):
            store_bfloat(target + c * 2, load_scalar(source + c * size, one) * factor)


@part()
def store_rest(source, target, dim, factor, kind, one):
    """What ``store_row`` of the same row loses by rounding to 16 bits; 0 where that is no finite number."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    whole = dim // n * n
    scale = splat(factor)
    zero = cast(0.0, one)
    zeros = splat(zero)
    for c in range(whole // n):
        value = mul(load(source + c * width, one), scale)
        at = target + c * n * 2
        if kind == 1:
            store_half(at, value)
            lost = sub(value, load_half(at, one))
            store_half(at, keep_where_equal(mul(lost, zeros), zero, lost, zeros))
        else:
            store_bfloat(at, value)
            lost = sub(value, load_bfloat(at, one))
            store_bfloat(at, keep_where_equal(mul(lost, zeros), zero, lost, zeros))
    for c in range(whole, dim):
        scalar = load_scalar(source + c * size, one) * factor
        at = target + c * 2
        if kind == 1:
            store_half(at, scalar)
        else:
            store_bfloat(at, scalar)
        rest = scalar - element(at, kind, one)
        rest = rest if rest * zero == zero else zero
        if kind == 1:
            store_half(at, rest)
        else:
            store_bfloat(at, rest)


@part()
def fill_zero(target, vectors, one):
    """``vectors`` whole vectors of zeros."""
    zero = splat(cast(0.0, one))
    width = vector_bytes(one)
    for c in range(vectors):
        store(target + c * width, zero)


@part(types.boolean)
def has_nonfinite(source, source_row, rows, vectors, one):
    """Whether an inf or NaN is among the rows: x * 0 is 0 for every finite x and NaN for the others."""
    width = vector_bytes(one)
    zero = splat(cast(0.0, one))
    even = zero
    odd = zero
    for r in range(rows):
        s = source + r * source_row
        for c in range(vectors):
            even, odd = odd, fma(load(s + c * width, one), zero, even)
    return any_nan(even) or any_nan(odd)


NEGATIVE_INFINITY = -np.inf
