"""What happens to one tile of logits between the matrix products: softcap, bias, mask, softmax, dropout.

A block of rows is ``heads`` query heads from h0 times ``count`` queries from i0: row r belongs to head
h0 + r // count and query i0 + r % count. Longer queries come as one head and up to tile_q queries; the heads
of a group with few queries (decoding) stand together in one block.
"""

from numba import types

from npattn._dropout import R0, R1
from npattn.kernels._parts import part
from npattn.kernels._simd.exp import exp, exp_scalar, tanh
from npattn.kernels._simd.hashing import drop, fold
from npattn.kernels._simd.vectors import (
    add,
    any_greater,
    cast,
    div,
    fma,
    greater,
    hmax,
    keep_between,
    keep_bits,
    keep_where_equal,
    lanes,
    lesser,
    load,
    load_int32,
    load_scalar,
    maximum,
    mul,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    sub,
    vector_bytes,
)
from npattn.kernels.tile.numba_cpu._rows import NEGATIVE_INFINITY, element, fill_zero, has_nonfinite
from npattn.plans.tiles import BITS, INTERVAL


@part(types.intp)
def list_of(p, b, h):
    """The plan's list of batch element b and query head h."""
    b = b if p.list_batches > 1 else 0
    h = h if p.list_heads > 1 else 0
    return load_int32(p.list_of + (b * p.list_heads + h) * 4)


@part(types.intp)
def first_visible(p, lst, i0, count):
    """The smallest lo of ``count`` queries from i0."""
    best = load_int32(p.lo + lst * p.lo_row + i0 * 4)
    for ii in range(1, count):
        best = lesser(best, load_int32(p.lo + lst * p.lo_row + (i0 + ii) * 4))
    return best


@part(types.intp)
def last_visible(p, lst, i0, count):
    """The largest hi of ``count`` queries from i0."""
    best = load_int32(p.hi + lst * p.lo_row + i0 * 4)
    for ii in range(1, count):
        best = greater(best, load_int32(p.hi + lst * p.lo_row + (i0 + ii) * 4))
    return best


@part()
def scale_rows(s, s_row, rows, vectors, factor, one):
    """The tile times ``factor``."""
    width = vector_bytes(one)
    factors = splat(factor)
    for r in range(rows):
        for c in range(vectors):
            at = s + r * s_row + c * width
            store(at, mul(load(at, one), factors))


@part()
def cap_rows(p, s, s_row, rows, vectors, capped, one):
    """Logits become softcap * tanh(logits / softcap), in place, and in ``capped`` unless that is 0."""
    width = vector_bytes(one)
    cap = splat(cast(p.softcap, one))
    for r in range(rows):
        for c in range(vectors):
            at = r * s_row + c * width
            value = mul(cap, tanh(div(load(s + at, one), cap)))
            store(s + at, value)
            if capped != 0:
                store(capped + at, value)


@part(types.boolean)
def add_bias(p, b, h0, heads, i0, count, j0, width_k, s, s_row, one):
    """Add the bias; returns whether some entry is -inf, which masks its pair whatever the logit is."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    ninf = cast(NEGATIVE_INFINITY, one)
    ninfs = splat(ninf)
    whole = width_k // n * n if (p.bias_j == size and p.bias_kind == 0) else 0
    lowest = splat(cast(0.0, one))
    lowest_scalar = cast(0.0, one)
    for hh in range(heads):
        for ii in range(count):
            row = p.bias + b * p.bias_b + (h0 + hh) * p.bias_h + (i0 + ii) * p.bias_i + j0 * p.bias_j
            t = s + (hh * count + ii) * s_row
            for c in range(whole // n):
                value = load(row + c * width, one)
                lowest = keep_where_equal(value, ninf, ninfs, lowest)
                total = add(load(t + c * width, one), value)
                store(t + c * width, keep_where_equal(value, ninf, ninfs, total))
            for j in range(whole, width_k):
                scalar = element(row + j * p.bias_j, p.bias_kind, one)
                if scalar == ninf:
                    lowest_scalar = ninf
                    store_scalar(t + j * size, ninf)
                else:
                    store_scalar(t + j * size, load_scalar(t + j * size, one) + scalar)
    return any_greater(splat(cast(-1.0, one)), lowest) or lowest_scalar < 0


@part()
def mask_interval(p, lst, i0, heads, count, j0, width_k, s, s_row, vectors, one):
    """-inf where not lo <= j < hi, and in the padding behind ``width_k`` keys."""
    n = lanes(one)
    width = vector_bytes(one)
    ninfs = splat(cast(NEGATIVE_INFINITY, one))
    for ii in range(count):
        lo = load_int32(p.lo + lst * p.lo_row + (i0 + ii) * 4) - j0
        hi = lesser(load_int32(p.hi + lst * p.lo_row + (i0 + ii) * 4) - j0, width_k)
        for hh in range(heads):
            t = s + (hh * count + ii) * s_row
            for c in range(vectors):
                if lo > c * n or hi < (c + 1) * n:
                    store(t + c * width, keep_between(load(t + c * width, one), ninfs, c * n, lo, hi))


@part()
def mask_bits(p, bitmap, i0, heads, count, width_k, s, s_row, vectors, one):
    """-inf where the bit of the pair is not set, and in the padding behind ``width_k`` keys."""
    n = lanes(one)
    width = vector_bytes(one)
    words = p.tile_k // 32
    ninfs = splat(cast(NEGATIVE_INFINITY, one))
    for ii in range(count):
        row = p.bits + ((bitmap * p.tile_q + (i0 + ii) % p.tile_q) * words) * 4
        for hh in range(heads):
            t = s + (hh * count + ii) * s_row
            for c in range(vectors):
                word = load_int32(row + (c * n) // 32 * 4)
                value = keep_bits(load(t + c * width, one), ninfs, word, (c * n) % 32)
                if (c + 1) * n > width_k:
                    value = keep_between(value, ninfs, c * n, 0, width_k)
                store(t + c * width, value)


@part(types.boolean)
def finish_logits(p, b, lst, h0, heads, i0, count, j0, width_k, kind, bitmap, s, s_row, vectors, capped, one):
    """Everything between q @ k.T and the softmax, in place; returns whether the tile holds masked pairs."""
    n = lanes(one)
    if p.scale_after != 1.0:
        scale_rows(s, s_row, heads * count, vectors, cast(p.scale_after, one), one)
    if p.has_softcap:
        cap_rows(p, s, s_row, heads * count, vectors, capped, one)
    partial = False
    if p.has_bias:
        partial = add_bias(p, b, h0, heads, i0, count, j0, width_k, s, s_row, one)
    if kind == INTERVAL:
        mask_interval(p, lst, i0, heads, count, j0, width_k, s, s_row, vectors, one)
        return True
    if kind == BITS:
        mask_bits(p, bitmap, i0, heads, count, width_k, s, s_row, vectors, one)
        return True
    if width_k < vectors * n:  # the padding of the last key tile
        ninfs = splat(cast(NEGATIVE_INFINITY, one))
        at = (vectors - 1) * vector_bytes(one)
        for r in range(heads * count):
            t = s + r * s_row + at
            store(t, keep_between(load(t, one), ninfs, (vectors - 1) * n, 0, width_k))
    return partial


@part()
def online_softmax(s, s_row, m, l_parts, acc, acc_row, acc_vectors, rows, vectors, one):
    """One step of the online softmax: logits become exp(logits - m); m, l and acc follow the new maximum.

    m[r] is the running maximum (-inf before the first visible key). l_parts[r] holds one partial sum per
    lane, added up at the end only. The horizontal maximum is taken only in rows where some lane exceeds m:
    after the first few tiles that is rare.
    """
    size = scalar_bytes(one)
    width = vector_bytes(one)
    ninf = cast(NEGATIVE_INFINITY, one)
    zero = cast(0.0, one)
    for r in range(rows):
        t = s + r * s_row
        highest = load(t, one)
        for c in range(1, vectors):
            highest = maximum(highest, load(t + c * width, one))
        old = load_scalar(m + r * size, one)
        part = load(l_parts + r * width, one)
        if any_greater(highest, splat(old)):
            new = hmax(highest)  # above old in this branch
            if old > ninf:  # with nothing seen so far, acc and l are still zero
                alpha = splat(exp_scalar(old - new))
                part = mul(part, alpha)
                for c in range(acc_vectors):
                    at = acc + r * acc_row + c * width
                    store(at, mul(load(at, one), alpha))
            store_scalar(m + r * size, new)
            old = new
        base = splat(old if old != ninf else zero)
        for c in range(vectors):
            value = exp(sub(load(t + c * width, one), base))
            store(t + c * width, value)
            part = add(part, value)
        store(l_parts + r * width, part)


@part(types.int64)
def row_word(p, start, b, h, i):
    """r0 (start R0) or r1 (start R1) of the dropout generator."""
    return fold(fold(fold(fold(fold(start, p.seed_lo), p.seed_hi), b), h), i)


@part()
def drop_rows(p, b, h0, heads, i0, count, j0, s, s_row, vectors, one):
    """Weights dropped or divided by 1 - dropout_p."""
    n = lanes(one)
    width = vector_bytes(one)
    factor = cast(p.keep_factor, one)
    for hh in range(heads):
        for ii in range(count):
            r0 = row_word(p, R0, b, h0 + hh, i0 + ii)
            r1 = row_word(p, R1, b, h0 + hh, i0 + ii)
            t = s + (hh * count + ii) * s_row
            for c in range(vectors):
                at = t + c * width
                store(at, drop(load(at, one), r0, r1, j0 + c * n, p.threshold, factor))


@part()
def note_visible(s, s_row, visible, rows, vectors, one):
    """Write 0 where the logit is -inf, else 1: wanted only where a masked inf or NaN must not leak."""
    width = vector_bytes(one)
    ninf = cast(NEGATIVE_INFINITY, one)
    zeros = splat(cast(0.0, one))
    ones = splat(cast(1.0, one))
    for r in range(rows):
        for c in range(vectors):
            at = r * s_row + c * width
            store(visible + at, keep_where_equal(load(s + at, one), ninf, zeros, ones))


@part()
def clear_unseen(rows_at, row, count, vectors, visible, across, along, others, one):
    """Zero the rows that hold an inf or NaN and belong to no visible pair.

    ``visible`` (see ``note_visible``) steps by ``across`` from row to row, by ``along`` to each of the
    ``others`` it may meet.
    """
    zero = cast(0.0, one)
    for r in range(count):
        if has_nonfinite(rows_at + r * row, 0, 1, vectors, one):
            seen = False
            for o in range(others):
                seen = seen or load_scalar(visible + r * across + o * along, one) != zero
            if not seen:
                fill_zero(rows_at + r * row, vectors, one)


@part()
def matmul_visible(a, visible, a_row, a_col, b, b_row, c, c_row, rows, vectors, depth, one):
    """C += A @ B over visible pairs only, so that 0 * NaN does not occur; slow, for tiles with garbage.

    Sums in the order of ``matmul``, where a masked pair adds 0: the same bits.
    """
    width = vector_bytes(one)
    zero = cast(0.0, one)
    for r in range(rows):
        for v in range(vectors):
            total = splat(zero)
            for k in range(depth):
                at = r * a_row + k * a_col
                if load_scalar(visible + at, one) != zero:
                    weight = splat(load_scalar(a + at, one))
                    total = fma(weight, load(b + k * b_row + v * width, one), total)
            target = c + r * c_row + v * width
            store(target, add(load(target, one), total))
