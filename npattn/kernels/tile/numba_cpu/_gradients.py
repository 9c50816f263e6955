"""Some queries meet some keys on the way back: weights, their gradients, and the shares of dQ, dK and dV."""

from numba import types

from npattn._dropout import R0, R1
from npattn.kernels._parts import part
from npattn.kernels._simd.exp import exp
from npattn.kernels._simd.hashing import drop
from npattn.kernels._simd.matmul import matmul, matmul_pairs
from npattn.kernels._simd.vectors import (
    add,
    cast,
    fma,
    hsum,
    keep_where_equal,
    lanes,
    lesser,
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
from npattn.kernels.tile.numba_cpu._rows import (
    NEGATIVE_INFINITY,
    copy_rows,
    has_nonfinite,
    round_pairs_of_rows,
    round_rows,
)
from npattn.kernels.tile.numba_cpu._tile import (
    clear_unseen,
    finish_logits,
    matmul_visible,
    note_visible,
    row_word,
    scale_rows,
)


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


@part(types.boolean, static=("dot",))
def tile_gradients(
    p, b, h, lst, i0, count, j0, width_k, kind, bitmap, q, q_row, do, do_row, kt, vt, s, dp, capped,
    factor, dot, one,
):  # fmt: skip
    """S and dP of one pair of tiles, then P and factor * dS in place; returns whether pairs are masked."""
    n = lanes(one)
    size = scalar_bytes(one)
    vectors = (width_k + n - 1) // n
    s_row = p.tile_k * size
    if dot:
        matmul_pairs(q, q_row, 4, kt, s_row, s, s_row, count, vectors, (p.dim + 1) // 2, False, one)
        matmul_pairs(do, do_row, 4, vt, s_row, dp, s_row, count, vectors, (p.dim_v + 1) // 2, False, one)
    else:
        matmul(q, q_row, size, kt, s_row, s, s_row, count, vectors, p.dim, False, one)
        matmul(do, do_row, size, vt, s_row, dp, s_row, count, vectors, p.dim_v, False, one)
    masked = finish_logits(
        p, b, lst, h, 1, i0, count, j0, width_k, kind, bitmap, s, s_row, vectors, capped, one
    )
    if masked:
        note_visible(s, s_row, capped + p.tile_q * s_row, count, vectors, one)
    weights_and_grads(p, b, h, i0, count, j0, vectors, s, dp, s_row, masked, factor, one)
    return masked


@part(types.boolean, static=("dot",))
def weights_of_step(
    p, b, h, lst, i0, count, j0, width_k, kind, bitmap, q, q_row, do, do_row, kt, vt, s, dp, capped, dot, one
):
    """P and dS (times ``grad_before``) of some queries and some keys, and the bias's share of dS."""
    n = lanes(one)
    s_row = p.tile_k * scalar_bytes(one)
    vectors = (width_k + n - 1) // n
    scale = cast(p.grad_before, one)
    late = p.has_bias or p.has_softcap  # the scale waits until dbias has had its share
    masked = tile_gradients(
        p, b, h, lst, i0, count, j0, width_k, kind, bitmap, q, q_row, do, do_row, kt, vt, s, dp, capped,
        cast(1.0, one) if late else scale, dot, one,
    )  # fmt: skip
    if late:
        if p.dbias != 0:
            add_dbias(p, b, h, i0, count, j0, width_k, dp, s_row, one)
        if p.has_softcap:
            uncap(p, dp, capped, s_row, count, vectors, scale, one)
        else:
            scale_rows(dp, s_row, count, vectors, scale, one)
    return masked


@part(types.boolean)
def add_visible(p, masked, count, width_k, q, do, v_row, k, k_row, s, dp, capped, dq, dk, dv, one):
    """Add the shares of dQ, dK and dV pair by pair if masked pairs meet an inf or NaN; returns whether."""
    if not masked:
        return False
    n = lanes(one)
    size = scalar_bytes(one)
    s_row = p.tile_k * size
    q_vectors = (p.dim + n - 1) // n
    v_vectors = (p.dim_v + n - 1) // n
    q_row = q_vectors * vector_bytes(one)
    if not (
        has_nonfinite(k, k_row, width_k, q_vectors, one)
        or has_nonfinite(q, q_row, count, q_vectors, one)
        or has_nonfinite(do, v_row, count, v_vectors, one)
    ):
        return False
    visible = capped + p.tile_q * s_row
    matmul_visible(s, visible, size, s_row, do, v_row, dv, v_row, width_k, v_vectors, count, one)
    matmul_visible(dp, visible, size, s_row, q, q_row, dk, q_row, width_k, q_vectors, count, one)
    matmul_visible(dp, visible, s_row, size, k, k_row, dq, p.dq_row, count, q_vectors, width_k, one)
    return True


@part()
def pair_step(
    p, b, h, lst, i0, count, j0, width_k, kind, bitmap, q, do, v_row, kt, vt, k, k_row, s, dp, capped, dq, dk,
    dv, one,
):  # fmt: skip
    """Some queries meet some keys: their shares of dQ, dK and dV."""
    n = lanes(one)
    size = scalar_bytes(one)
    s_row = p.tile_k * size
    q_vectors = (p.dim + n - 1) // n
    v_vectors = (p.dim_v + n - 1) // n
    q_row = q_vectors * vector_bytes(one)
    masked = weights_of_step(
        p, b, h, lst, i0, count, j0, width_k, kind, bitmap, q, q_row, do, v_row, kt, vt, s, dp, capped, False,
        one,
    )  # fmt: skip
    if not add_visible(p, masked, count, width_k, q, do, v_row, k, k_row, s, dp, capped, dq, dk, dv, one):
        matmul(s, size, s_row, do, v_row, dv, v_row, width_k, v_vectors, count, True, one)
        matmul(dp, size, s_row, q, q_row, dk, q_row, width_k, q_vectors, count, True, one)
        matmul(dp, s_row, size, k, k_row, dq, p.dq_row, count, q_vectors, width_k, True, one)


@part()
def pair_step_of_pairs(
    p, b, h, g, lst, i0, count, j0, width_k, kind, bitmap, q, q_row, do, do_row, kt, vt, q_pairs, do_pairs,
    k_pairs, p_pairs, ds_pairs, ds_rows, wide, s, dp, capped, dq, dk, dv, one,
):  # fmt: skip
    """The same by bfloat16 dot products: P and dS are rounded, dS along the keys and along the queries."""
    n = lanes(one)
    width = vector_bytes(one)
    s_row = p.tile_k * scalar_bytes(one)
    vectors = (width_k + n - 1) // n
    q_vectors = (p.dim + n - 1) // n
    v_vectors = (p.dim_v + n - 1) // n
    k_row = q_vectors * width
    v_row = v_vectors * width
    masked = weights_of_step(
        p, b, h, lst, i0, count, j0, width_k, kind, bitmap, q, q_row, do, do_row, kt, vt, s, dp, capped, True,
        one,
    )  # fmt: skip
    if masked:
        wide_do = wide + p.tile_q * k_row
        wide_k = wide_do + p.tile_q * v_row
        keys_read = lesser((width_k + 1) // 2 * 2, p.len_k - j0)  # whole pairs are multiplied
        source = p.k + b * p.k_b + g * p.k_h + j0 * p.k_j
        copy_rows(source, p.k_j, wide_k, k_row, keys_read, p.dim, p.kind, one)
        source = p.q + b * p.q_b + h * p.q_h + i0 * p.q_i
        copy_rows(source, p.q_i, wide, k_row, count, p.dim, p.kind, one)
        source = p.dout + b * p.dout_b + h * p.dout_h + i0 * p.dout_i
        copy_rows(source, p.dout_i, wide_do, v_row, count, p.dim_v, p.kind, one)
        if (
            has_nonfinite(wide_k, k_row, keys_read, q_vectors, one)
            or has_nonfinite(wide, k_row, count, q_vectors, one)
            or has_nonfinite(wide_do, v_row, count, v_vectors, one)
        ):  # what meets nobody is multiplied as zeros: the same bits whatever it holds
            size = scalar_bytes(one)
            visible = capped + p.tile_q * s_row
            clear_unseen(wide_k, k_row, keys_read, q_vectors, visible, size, s_row, count, one)
            clear_unseen(wide, k_row, count, q_vectors, visible, s_row, size, width_k, one)
            clear_unseen(wide_do, v_row, count, v_vectors, visible, s_row, size, width_k, one)
            q_pairs = wide_k + p.tile_k * k_row
            do_pairs = q_pairs + p.tile_q // 2 * k_row
            k_pairs = do_pairs + p.tile_q // 2 * v_row
            round_pairs_of_rows(wide, k_row, q_pairs, k_row, count, q_vectors, one)
            round_pairs_of_rows(wide_do, v_row, do_pairs, v_row, count, v_vectors, one)
            round_pairs_of_rows(wide_k, k_row, k_pairs, k_row, keys_read, q_vectors, one)
        masked = add_visible(
            p, True, count, keys_read, wide, wide_do, v_row, wide_k, k_row, s, dp, capped, dq, dk, dv, one
        )
    if not masked:
        half_row = p.tile_k * 2
        pairs_q = (count + 1) // 2
        pairs_k = (width_k + 1) // 2
        round_pairs_of_rows(s, s_row, p_pairs, s_row, count, vectors, one)
        round_pairs_of_rows(dp, s_row, ds_pairs, s_row, count, vectors, one)
        round_rows(dp, ds_rows, s_row, half_row, count, vectors, one)
        matmul_pairs(p_pairs, 4, s_row, do_pairs, v_row, dv, v_row, width_k, v_vectors, pairs_q, True, one)
        matmul_pairs(ds_pairs, 4, s_row, q_pairs, k_row, dk, k_row, width_k, q_vectors, pairs_q, True, one)
        matmul_pairs(ds_rows, half_row, 4, k_pairs, k_row, dq, p.dq_row, count, q_vectors, pairs_k, True, one)
