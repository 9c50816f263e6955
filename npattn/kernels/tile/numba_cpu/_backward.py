"""Backward kernels: five matrix products per pair of tiles, no atomics.

Loop order: a work unit is one chunk of key tiles of one (batch element, key head). For each key tile it packs
K^T (scaled) and V^T, clears dK and dV of the tile in scratch, and walks the group's query heads and the
tile's query spans::

    S  = Q K^T        P  = exp(S - m) / l
    dP = dO V^T       dS = P * (dP - e)             e = delta - dlse, once per row in `row_units`
    dV += P^T dO      dK += dS^T Q      dQ += dS K

dK and dV of a tile belong to one unit. dQ belongs to a chunk: chunks that reach the same queries add into
different layers of dQ, and `reduce_units` adds these in order. How many chunks there are depends on the
problem, never on the threads, so the sums are made in one order whatever the machine does. P and dS are read
down their columns for dV and dK (`_simd.matmul` takes any strides for A): nothing is transposed but K and V,
once per key tile.

dbias: where one unit sees every pair that a bias entry belongs to, dS is added to it on the way; a bias
shared by batch elements or by heads of several units is served by `bias_units`, which recomputes S and dP
(two more products), each unit owning the entries it adds to. A bias that all keys of a row share needs no
pair at all (`kernels.contract.dbias_of_rows`).

``dot`` (bfloat16 on processors with its dot products): all five products take pairs of bfloat16, added up in
float32. P and dS are rounded once their rows are done, P in pairs along the queries, dS both ways;
exponentials, delta and the sums of dbias and dsinks see the unrounded ones.

Versions (Zen 4, one core, percent of the FMA peak, float32, backward alone; full / causal):

=============================================== ================ ================= ==============
version                                         1,1,1024,64      1,1,2048,128      1,12,128,64
=============================================== ================ ================= ==============
tiles 48 x 64, edge tiles computed whole        83 / 73          91 / 83           70 / 38
edge tiles in strips of 24 query rows           83 / 78          84-91 / 83        77 / 58
=============================================== ================ ================= ==============

bfloat16 dot products against float32 on two cores, backward alone, full / causal: 1.86 / 1.70 times as fast
at 1,8,2048,64, 1.78 / 1.75 at 1,8,2048,128, 1.68 / 1.46 at 8,12,128,64; 342 to 370 GFLOP/s of 458. Leaving
out the pass that scales the logits behind the product would bring 1 % (forward 3 %): it stays, as keys keep
their bits.

Q and dO are read in place where their rows are contiguous whole vectors, and copied per tile otherwise.
"""

from typing import Final

from npattn.kernels._jit import jit
from npattn.kernels._parts import part
from npattn.kernels._simd.exp import exp_scalar
from npattn.kernels._simd.vectors import (
    add,
    cast,
    greater,
    hsum,
    keep_where_equal,
    lanes,
    lesser,
    load,
    load_int32,
    load_int64,
    load_scalar,
    mul,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    vector_bytes,
)
from npattn.kernels.tile.numba_cpu._gradients import (
    add_dbias,
    pair_step,
    pair_step_of_pairs,
    tile_gradients,
)
from npattn.kernels.tile.numba_cpu._params import params_at
from npattn.kernels.tile.numba_cpu._rows import (
    NEGATIVE_INFINITY,
    copy_pairs,
    copy_rows,
    fill_zero,
    pack_pairs_of_rows,
    pack_pairs_transposed,
    pack_transposed,
    store_row,
)
from npattn.kernels.tile.numba_cpu._tile import (
    first_visible,
    last_visible,
    list_of,
)
from npattn.plans.tiles import INTERVAL

STRIP: Final = 24  # rows of a tile that an interval's edge crosses: four register tiles


@jit
def row_units(address, first, stop, scratch, one):
    """See ``_row_units``."""
    _row_units(address, first, stop, scratch, one)


@part()
def _row_units(address, first, stop, scratch, one):
    """Per row: e = delta - dlse and 1 / l; per head: its share of dsinks. unit = b * heads_q + h."""
    p = params_at(address)
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    vectors = (p.dim_v + n - 1) // n
    v_row = vectors * width
    zero = cast(0.0, one)
    zeros = splat(zero)
    dout = scratch
    out = scratch + v_row
    rest = out + v_row
    for unit in range(first, stop):
        b = unit // p.heads_q
        h = unit % p.heads_q
        sink = cast(NEGATIVE_INFINITY, one)
        if p.has_sinks:
            sink = load_scalar(p.sinks + h * size, one)
        dsink = 0.0
        for i in range(p.len_q):
            source = p.dout + b * p.dout_b + h * p.dout_h + i * p.dout_i
            copy_rows(source, 0, dout, 0, 1, p.dim_v, p.kind, one)
            source = p.out + b * p.out_b + h * p.out_h + i * p.out_i
            copy_rows(source, 0, out, 0, 1, p.dim_v, p.kind, one)
            if p.rest != 0:
                source = p.rest + ((b * p.heads_q + h) * p.len_q + i) * p.dim_v * 2
                copy_rows(source, 0, rest, 0, 1, p.dim_v, p.kind, one)
            total = zeros
            for c in range(vectors):
                value = load(out + c * width, one)
                if p.rest != 0:
                    value = add(value, load(rest + c * width, one))
                term = mul(value, load(dout + c * width, one))
                total = add(total, keep_where_equal(value, zero, zeros, term))
            e = hsum(total)
            if p.dlse != 0:
                e = e - load_scalar(p.dlse + b * p.dlse_b + h * p.dlse_h + i * p.dlse_i, one)
            at = (unit * p.len_q + i) * size
            l = load_scalar(p.l + at, one)
            inverse = cast(1.0, one) / l if l != zero else zero
            store_scalar(p.e + at, e)
            store_scalar(p.rl + at, inverse)
            if sink != NEGATIVE_INFINITY and inverse != zero:
                dsink -= exp_scalar(sink - load_scalar(p.m + at, one)) * inverse * e
        if p.has_sinks:
            store_scalar(p.dsinks + unit * 8, dsink)


@part(static=("dot",))
def key_tile(p, b, g, chunk, tile, scratch, dot, one):
    """Compute dK and dV of one key tile, and its share of dQ."""
    layer = load_int64(p.reach + chunk * 24 + 16)
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    q_vectors = (p.dim + n - 1) // n
    v_vectors = (p.dim_v + n - 1) // n
    q_row = q_vectors * width
    v_row = v_vectors * width
    s_row = p.tile_k * size
    square = p.tile_q * s_row
    s = scratch
    dp = s + square
    capped = dp + square
    kt = capped + 2 * square
    vt = kt + p.dim * s_row
    dk = vt + p.dim_v * s_row
    dv = dk + p.tile_k * q_row
    q_copy = dv + p.tile_k * v_row
    do_copy = q_copy + p.tile_q * q_row
    k_copy = do_copy + p.tile_q * v_row
    q_pairs = k_copy + p.tile_k * q_row  # from here on for bfloat16 dot products only
    do_pairs = q_pairs + p.tile_q // 2 * q_row
    p_pairs = do_pairs + p.tile_q // 2 * v_row
    ds_pairs = p_pairs + square // 2
    ds_rows = ds_pairs + square // 2
    wide = ds_rows + square // 2

    j0 = tile * p.tile_k
    width_k = lesser(p.tile_k, p.len_k - j0)
    k = p.k + b * p.k_b + g * p.k_h + j0 * p.k_j
    v = p.v + b * p.v_b + g * p.v_h + j0 * p.v_j
    k_row = p.k_j
    if dot:
        pack_pairs_transposed(k, p.k_j, kt, s_row, width_k, p.dim, one)
        pack_pairs_transposed(v, p.v_j, vt, s_row, width_k, p.dim_v, one)
        pack_pairs_of_rows(k, p.k_j, k_copy, q_row, width_k, p.dim, one)
    else:
        pack_transposed(k, p.k_j, kt, s_row, width_k, p.dim, cast(p.scale_before, one), p.kind, one)
        pack_transposed(v, p.v_j, vt, s_row, width_k, p.dim_v, cast(1.0, one), p.kind, one)
        if p.kind != 0 or p.dim != q_vectors * n:
            copy_rows(k, p.k_j, k_copy, q_row, width_k, p.dim, p.kind, one)
            k = k_copy
            k_row = q_row
    fill_zero(dk, width_k * q_vectors, one)
    fill_zero(dv, width_k * v_vectors, one)

    for h in range(g * p.group, (g + 1) * p.group):
        lst = list_of(p, b, h)
        ptr = p.col_ptr + (lst * (p.num_cols + 1) + tile) * 4
        for span in range(load_int32(ptr), load_int32(ptr + 4)):
            kind = load_int32(p.col_kind + span * 4)
            bitmap = load_int32(p.col_bits + span * 4)
            for row in range(load_int32(p.col_first + span * 4), load_int32(p.col_stop + span * 4)):
                tile_i0 = row * p.tile_q
                tile_count = lesser(p.tile_q, p.len_q - tile_i0)
                q = p.q + b * p.q_b + h * p.q_h + tile_i0 * p.q_i
                do = p.dout + b * p.dout_b + h * p.dout_h + tile_i0 * p.dout_i
                a_row = p.q_i
                do_row = p.dout_i
                if dot:
                    pack_pairs_of_rows(q, p.q_i, q_pairs, q_row, tile_count, p.dim, one)
                    pack_pairs_of_rows(do, p.dout_i, do_pairs, v_row, tile_count, p.dim_v, one)
                    if p.dim % 2 != 0:
                        copy_pairs(q, p.q_i, q_copy, q_row, tile_count, p.dim, one)
                        q = q_copy
                        a_row = q_row
                    if p.dim_v % 2 != 0:
                        copy_pairs(do, p.dout_i, do_copy, v_row, tile_count, p.dim_v, one)
                        do = do_copy
                        do_row = v_row
                else:
                    if p.kind != 0 or p.q_i != q_row or p.dim != q_vectors * n:
                        copy_rows(q, p.q_i, q_copy, q_row, tile_count, p.dim, p.kind, one)
                        q = q_copy
                    if p.kind != 0 or p.dout_i != v_row or p.dim_v != v_vectors * n:
                        copy_rows(do, p.dout_i, do_copy, v_row, tile_count, p.dim_v, p.kind, one)
                        do = do_copy
                dq = p.dq + (((layer * p.batch + b) * p.heads_q + h) * p.len_q + tile_i0) * p.dq_row
                strip = STRIP if kind == INTERVAL else tile_count
                for r in range(0, tile_count, strip):
                    i0 = tile_i0 + r
                    count = lesser(strip, tile_count - r)
                    skip = 0
                    stop = width_k
                    if kind == INTERVAL:
                        stop = lesser(width_k, last_visible(p, lst, i0, count) - j0)
                        skip = greater(first_visible(p, lst, i0, count) - j0, 0) // n * n
                    if skip < stop:
                        if dot:
                            pair_step_of_pairs(
                                p, b, h, g, lst, i0, count, j0 + skip, stop - skip, kind, bitmap,
                                q + r * a_row, a_row, do + r * do_row, do_row,
                                kt + skip * size, vt + skip * size,
                                q_pairs + r // 2 * q_row, do_pairs + r // 2 * v_row,
                                k_copy + skip // 2 * q_row, p_pairs, ds_pairs, ds_rows, wide,
                                s, dp, capped, dq + r * p.dq_row, dk + skip * q_row, dv + skip * v_row, one,
                            )  # fmt: skip
                        else:
                            pair_step(
                                p, b, h, lst, i0, count, j0 + skip, stop - skip, kind, bitmap,
                                q + r * q_row, do + r * v_row, v_row,
                                kt + skip * size, vt + skip * size, k + skip * k_row, k_row,
                                s, dp, capped, dq + r * p.dq_row, dk + skip * q_row, dv + skip * v_row, one,
                            )  # fmt: skip

    item = size if p.kind == 0 else 2
    after = cast(p.grad_after, one)
    unit = cast(1.0, one)
    for j in range(width_k):
        at = (b * p.heads_kv + g) * p.len_k + j0 + j
        store_row(dk + j * q_row, p.dk + at * p.dim * item, p.dim, after, p.kind, one)
        store_row(dv + j * v_row, p.dv + at * p.dim_v * item, p.dim_v, unit, p.kind, one)


@jit
def key_units(address, first, stop, scratch, one):
    """See ``_key_units``."""
    _key_units(address, first, stop, scratch, False, one)


@jit
def key_units_of_pairs(address, first, stop, scratch, one):
    """The same with bfloat16 dot products, for processors that have them (`_host.HAS_BF16_DOT`)."""
    _key_units(address, first, stop, scratch, True, one)


@part(static=("dot",))
def _key_units(address, first, stop, scratch, dot, one):
    """Compute dK, dV and the chunks' dQ; unit = chunk * (batch * heads_kv) + b * heads_kv + g."""
    p = params_at(address)
    pairs = p.batch * p.heads_kv
    for unit in range(first, stop):
        chunk = unit // pairs
        pair = unit % pairs
        b = pair // p.heads_kv
        g = pair % p.heads_kv
        start = p.chunk_start + chunk * 8
        for tile in range(load_int64(start), load_int64(start + 8)):
            key_tile(p, b, g, chunk, tile, scratch, dot, one)


@jit
def reduce_units(address, first, stop, scratch, one):
    """See ``_reduce_units``."""
    _reduce_units(address, first, stop, scratch, one)


@part()
def _reduce_units(address, first, stop, scratch, one):
    """Finish dQ: the chunks' shares added in order and rounded into the result; unit = b * heads_q + h."""
    p = params_at(address)
    n = lanes(one)
    width = vector_bytes(one)
    vectors = (p.dim + n - 1) // n
    item = scalar_bytes(one) if p.kind == 0 else 2
    after = cast(p.grad_after, one)
    layer_bytes = p.batch * p.heads_q * p.len_q * p.dq_row
    for unit in range(first, stop):
        for chunk in range(1, p.chunks):
            # only the query tiles this chunk reached: the rest of its layer is another chunk's or untouched
            layer = load_int64(p.reach + chunk * 24 + 16)
            start = load_int64(p.reach + chunk * 24) * p.tile_q
            end = lesser(load_int64(p.reach + chunk * 24 + 8) * p.tile_q, p.len_q)
            if layer == 0:  # it added into the first layer itself
                end = start
            for i in range(start, end):
                at = p.dq + (unit * p.len_q + i) * p.dq_row
                for c in range(vectors):
                    total = add(load(at + c * width, one), load(at + layer * layer_bytes + c * width, one))
                    store(at + c * width, total)
        if p.dq_out != p.dq:
            for i in range(p.len_q):
                at = unit * p.len_q + i
                store_row(p.dq + at * p.dq_row, p.dq_out + at * p.dim * item, p.dim, after, p.kind, one)


@jit
def bias_units(address, first, stop, scratch, one):
    """See ``_bias_units``."""
    _bias_units(address, first, stop, scratch, one)


@part()
def _bias_units(address, first, stop, scratch, one):
    """Compute dbias of a bias that several (batch element, key head) pairs share.

    unit = (bb * dbias_heads + hb) * rows + row over the bias's own batch and head axes, with rows = 1 where
    queries share an entry. A unit adds up everything its entries belong to, in a fixed order.
    """
    p = params_at(address)
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    q_vectors = (p.dim + n - 1) // n
    v_vectors = (p.dim_v + n - 1) // n
    q_row = q_vectors * width
    v_row = v_vectors * width
    s_row = p.tile_k * size
    square = p.tile_q * s_row
    s = scratch
    dp = s + square
    capped = dp + square
    kt = capped + 2 * square
    vt = kt + p.dim * s_row
    q = vt + p.dim_v * s_row
    do = q + p.tile_q * q_row
    rows = p.num_rows if p.dbias_i != 0 else 1
    for unit in range(first, stop):
        bb = unit // rows // p.dbias_heads
        hb = unit // rows % p.dbias_heads
        row_first = unit % rows
        row_stop = row_first + 1
        if p.dbias_i == 0:
            row_stop = p.num_rows
        b_first = bb if p.dbias_batches > 1 else 0
        b_stop = bb + 1 if p.dbias_batches > 1 else p.batch
        h_first = hb if p.dbias_heads > 1 else 0
        h_stop = hb + 1 if p.dbias_heads > 1 else p.heads_q
        for b in range(b_first, b_stop):
            for h in range(h_first, h_stop):
                lst = list_of(p, b, h)
                for row in range(row_first, row_stop):
                    i0 = row * p.tile_q
                    count = lesser(p.tile_q, p.len_q - i0)
                    source = p.q + b * p.q_b + h * p.q_h + i0 * p.q_i
                    copy_rows(source, p.q_i, q, q_row, count, p.dim, p.kind, one)
                    source = p.dout + b * p.dout_b + h * p.dout_h + i0 * p.dout_i
                    copy_rows(source, p.dout_i, do, v_row, count, p.dim_v, p.kind, one)
                    ptr = p.row_ptr + (lst * (p.num_rows + 1) + row) * 4
                    for span in range(load_int32(ptr), load_int32(ptr + 4)):
                        kind = load_int32(p.row_kind + span * 4)
                        bitmap = load_int32(p.row_bits + span * 4)
                        for tile in range(
                            load_int32(p.row_first + span * 4), load_int32(p.row_stop + span * 4)
                        ):
                            j0 = tile * p.tile_k
                            width_k = lesser(p.tile_k, p.len_k - j0)
                            g = h // p.group
                            k = p.k + b * p.k_b + g * p.k_h + j0 * p.k_j
                            before = cast(p.scale_before, one)
                            pack_transposed(k, p.k_j, kt, s_row, width_k, p.dim, before, p.kind, one)
                            v = p.v + b * p.v_b + g * p.v_h + j0 * p.v_j
                            unity = cast(1.0, one)
                            pack_transposed(v, p.v_j, vt, s_row, width_k, p.dim_v, unity, p.kind, one)
                            tile_gradients(
                                p, b, h, lst, i0, count, j0, width_k, kind, bitmap, q, q_row, do, v_row, kt,
                                vt, s, dp, capped, unity, False, one,
                            )  # fmt: skip
                            add_dbias(p, b, h, i0, count, j0, width_k, dp, s_row, one)


__all__ = ["bias_units", "key_units", "key_units_of_pairs", "reduce_units", "row_units"]
