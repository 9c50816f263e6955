"""One tile of logits on the way back: weights, their gradients, softcap and bias."""

from npattn._dropout import R0, R1
from npattn.kernels._parts import part
from npattn.kernels._simd.exp import exp
from npattn.kernels._simd.hashing import drop
from npattn.kernels._simd.vectors import (
    add,
    cast,
    fma,
    hsum,
    keep_where_equal,
    lanes,
    load,
    load_scalar,
    mul,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    sub,
    vector_bytes,
)
from npattn.kernels.tile.numba_cpu._rows import NEGATIVE_INFINITY
from npattn.kernels.tile.numba_cpu._tile import row_word


@part()
def weights_and_grads(p, b, h, i0, count, j0, vectors, s, dp, s_row, masked, factor, one):
    """Logits become dropped weights P, dP becomes factor * dS.

    ``masked``: some logits are -inf, and 0 * NaN must not come of them.
    """
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    ninf = cast(NEGATIVE_INFINITY, one)
    zeros = splat(cast(0.0, one))
    ones = splat(cast(1.0, one))
    factors = splat(factor)
    keep_factor = cast(p.keep_factor, one)
    for ii in range(count):
        at = ((b * p.heads_q + h) * p.len_q + i0 + ii) * size
        m = splat(load_scalar(p.m + at, one))
        rl = splat(load_scalar(p.rl + at, one))
        e = splat(load_scalar(p.e + at, one))
        sr = s + ii * s_row
        dr = dp + ii * s_row
        if p.has_dropout:
            r0 = row_word(p, R0, b, h, i0 + ii)
            r1 = row_word(p, R1, b, h, i0 + ii)
            for c in range(vectors):
                keep = drop(ones, r0, r1, j0 + c * n, p.threshold, keep_factor)
                x = load(sr + c * width, one)
                weight = mul(exp(sub(x, m)), rl)
                ds = mul(mul(weight, factors), sub(mul(load(dr + c * width, one), keep), e))
                store(sr + c * width, keep_where_equal(x, ninf, zeros, mul(weight, keep)))
                store(dr + c * width, keep_where_equal(x, ninf, zeros, ds))
        elif masked:
            for c in range(vectors):
                x = load(sr + c * width, one)
                weight = mul(exp(sub(x, m)), rl)
                ds = mul(mul(weight, factors), sub(load(dr + c * width, one), e))
                store(sr + c * width, keep_where_equal(x, ninf, zeros, weight))
                store(dr + c * width, keep_where_equal(x, ninf, zeros, ds))
        else:
            for c in range(vectors):
                weight = mul(exp(sub(load(sr + c * width, one), m)), rl)
                ds = mul(mul(weight, factors), sub(load(dr + c * width, one), e))
                store(sr + c * width, weight)
                store(dr + c * width, ds)


@part()
def add_dbias(p, b, h, i0, count, j0, width_k, ds, s_row, one):
    """Add dS to the entries of dbias that its pairs share; dbias_j is one element, or 0 where keys share."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    whole = width_k // n
    for ii in range(count):
        target = p.dbias + b * p.dbias_b + h * p.dbias_h + (i0 + ii) * p.dbias_i + j0 * p.dbias_j
        row = ds + ii * s_row
        if p.dbias_j == 0:
            total = splat(cast(0.0, one))
            for c in range(whole):
                total = add(total, load(row + c * width, one))
            value = hsum(total)
            for j in range(whole * n, width_k):
                value += load_scalar(row + j * size, one)
            store_scalar(target, load_scalar(target, one) + value)
        else:
            for c in range(whole):
                at = target + c * width
                store(at, add(load(at, one), load(row + c * width, one)))
            for j in range(whole * n, width_k):
                at = target + j * size
                store_scalar(at, load_scalar(at, one) + load_scalar(row + j * size, one))


@part()
def uncap(p, ds, capped, s_row, rows, vectors, factor, one):
    """Through softcap: dS times factor * (1 - (capped / softcap)**2)."""
    width = vector_bytes(one)
    inverse = splat(cast(1.0 / p.softcap, one))
    ones = splat(cast(1.0, one))
    minus = splat(cast(-1.0, one))
    factors = splat(factor)
    for r in range(rows):
        for c in range(vectors):
            at = r * s_row + c * width
            t = mul(load(capped + at, one), inverse)
            slope = fma(mul(t, minus), t, ones)
            store(ds + at, mul(mul(load(ds + at, one), factors), slope))
