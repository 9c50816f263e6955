"""Forward kernel: tiled online softmax.

Loop order: a work unit is one chunk of query tiles of one (batch element, key head). It packs the key tiles
it will see, transposed, scaled and widened (values too where they are stored in 16 bits or their rows are no
whole vectors), then walks the group's query heads, the chunk's query tiles and each tile's spans. A unit
writes only its own rows of out, m and l, so no two units meet and nothing depends on the thread count.

In scratch: the query block (rows, dim), logits (rows, tile_k), acc (rows, dim_v), m, l as one partial sum per
lane, and the packed keys. In registers: a tile of 6 rows x 4 vectors of logits or acc (`_simd.matmul`).

``dot`` (bfloat16 on processors with its dot products): logits from the keys' own bits, scaled afterwards;
weights rounded to bfloat16 for the second product; every sum in float32, l of unrounded weights.

Versions (Zen 4, one core, percent of the FMA peak of 114-118 GFLOP/s, float32; full / causal):

=============================================== ================ ================= ==============
version                                         1,1,1024,64      1,1,2048,128      1,12,128,64
=============================================== ================ ================= ==============
tiles 48 x 64, edge tiles computed whole        82 / 72          88 / 81           70 / 42
edge tiles in strips of 12 rows, as wide as
their rows see                                  82 / 80          87 / 84           78 / 57
bfloat16 dot products (of the float32 peak)     130 / 125        155 / 144         119 / 74
=============================================== ================ ================= ==============

Short sequences (one core, 32,12,64,32): 55 % of the peak; with q read in place and l summed for 16 rows at a
time 63. There softmax takes 14 % of the time, packing K 8, the products 60. Fetching the next unit's rows
ahead (prefetch instructions, a share with each query tile) brought nothing, 128 keys a tile neither.

The first line already has: the horizontal maximum only in rows where a lane exceeds m; l as partial sums per
lane; K transposed in registers while it is packed; key tile 64 (in the prototype better than 128 and 256).
Taken out again: adding to l what rounding the weights to bfloat16 takes away, which put an error of 7e-4 into
lse where float32 sums leave 5e-7.
"""

from typing import Final

from numba import types

from npattn.kernels._jit import jit
from npattn.kernels._parts import part
from npattn.kernels._simd.matmul import matmul, matmul_pairs
from npattn.kernels._simd.row_sums import row_sums
from npattn.kernels._simd.vectors import (
    cast,
    div,
    greater,
    keep_where_equal,
    lanes,
    lesser,
    load,
    load_int32,
    load_scalar,
    only_first,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    vector_bytes,
)
from npattn.kernels.tile.numba_cpu._params import params_at
from npattn.kernels.tile.numba_cpu._rows import (
    NEGATIVE_INFINITY,
    copy_pairs,
    copy_rows,
    fill_zero,
    has_nonfinite,
    pack_pairs_of_rows,
    pack_pairs_transposed,
    pack_transposed,
    round_pairs_of_rows,
    round_rows,
    store_rest,
    store_row,
)
from npattn.kernels.tile.numba_cpu._tile import (
    clear_unseen,
    drop_rows,
    finish_logits,
    first_visible,
    last_visible,
    list_of,
    matmul_visible,
    note_visible,
    online_softmax,
    scale_rows,
)
from npattn.plans.tiles import INTERVAL

STRIP: Final = 12  # rows; two register tiles


@part(static=("dot",))
def key_step(
    p, b, lst, h0, heads, i0, count, j0, width_k, kind, bitmap, q, q_row, packed, v, value_row, s, visible, m,
    l_parts, acc, acc_row, shares, rounded, plain_v, g, dot, one,
):  # fmt: skip
    """One step of the online softmax: a block of rows meets up to tile_k keys.

    ``shares`` is 0, or where 1 / l stands for each row once m and l are final.
    """
    n = lanes(one)
    size = scalar_bytes(one)
    s_row = p.tile_k * size
    rows = heads * count
    vectors = (width_k + n - 1) // n
    acc_vectors = (p.dim_v + n - 1) // n
    if dot:
        depth = (p.dim + 1) // 2
        matmul_pairs(q, q_row, 4, packed, s_row, s, s_row, rows, vectors, depth, False, one)
    else:
        matmul(q, q_row, size, packed, s_row, s, s_row, rows, vectors, p.dim, False, one)
    partial = finish_logits(
        p, b, lst, h0, heads, i0, count, j0, width_k, kind, bitmap, s, s_row, vectors, 0, one
    )
    v_at = v
    v_row = value_row
    if partial:
        if dot:  # whole pairs are multiplied: the key behind an odd width too
            v_at = plain_v
            v_row = acc_row
            keys_read = lesser((width_k + 1) // 2 * 2, p.len_k - j0)
            source = p.v + b * p.v_b + g * p.v_h + j0 * p.v_j
            copy_rows(source, p.v_j, plain_v, acc_row, keys_read, p.dim_v, p.kind, one)
            partial = has_nonfinite(plain_v, acc_row, keys_read, acc_vectors, one)
        else:
            partial = has_nonfinite(v, value_row, width_k, acc_vectors, one)
        if partial:
            note_visible(s, s_row, visible, rows, vectors, one)
            if dot:  # what no row sees is multiplied as zeros: the same bits whatever it holds
                clear_unseen(plain_v, acc_row, keys_read, acc_vectors, visible, size, s_row, rows, one)
                partial = has_nonfinite(plain_v, acc_row, keys_read, acc_vectors, one)
                if not partial:
                    v = rounded + p.tile_q * p.tile_k * 2
                    round_pairs_of_rows(plain_v, acc_row, v, value_row, keys_read, acc_vectors, one)
    online_softmax(s, s_row, m, l_parts, acc, acc_row, acc_vectors, rows, vectors, one)
    if shares != 0:
        for r in range(rows):
            scale_rows(s + r * s_row, s_row, 1, vectors, load_scalar(shares + r * size, one), one)
    if p.has_dropout:
        drop_rows(p, b, h0, heads, i0, count, j0, s, s_row, vectors, one)
    if partial:
        matmul_visible(s, visible, s_row, size, v_at, v_row, acc, acc_row, rows, acc_vectors, width_k, one)
    else:
        if dot:
            half_row = p.tile_k * 2
            round_rows(s, rounded, s_row, half_row, rows, vectors, one)
            depth = (width_k + 1) // 2
            matmul_pairs(
                rounded, half_row, 4, v, value_row, acc, acc_row, rows, acc_vectors, depth, True, one
            )
        else:
            matmul(s, s_row, size, v, value_row, acc, acc_row, rows, acc_vectors, width_k, True, one)


@part(static=("dot",))
def query_block(
    p, b, g, h0, heads, row, split, tile_first, tile_stop, scratch, keys, values, value_row, pack_first, dot,
    one,
):  # fmt: skip
    """Query tile ``row`` of ``heads`` heads from h0 meets key tiles tile_first .. tile_stop."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    i0 = row * p.tile_q
    count = lesser(p.tile_q, p.len_q - i0)
    rows = heads * count
    acc_vectors = (p.dim_v + n - 1) // n
    q_row = (p.dim + n - 1) // n * width
    acc_row = acc_vectors * width
    s_row = p.tile_k * size
    key_tile = p.dim * s_row
    v_rows = p.tile_k
    if dot:
        key_tile = (p.dim + 1) // 2 * s_row
        v_rows = p.tile_k // 2
    s = scratch
    visible = s + p.tile_q * s_row
    m = visible + p.tile_q * s_row
    shares = m + p.tile_q * size
    totals = shares + p.tile_q * size
    again = totals + p.tile_q * size
    l_parts = again + p.tile_q * size
    q = l_parts + p.tile_q * width
    acc = q + p.tile_q * q_row
    plain_v = acc + p.tile_q * acc_row  # these two for pairs of bfloat16 only
    rounded = plain_v + p.tile_k * acc_row

    source = p.q + b * p.q_b + h0 * p.q_h + i0 * p.q_i
    if not dot and p.kind == 0 and p.q_i == p.dim * size and (heads == 1 or p.q_h == p.len_q * p.q_i):
        q = source  # rows one behind the other are read where they are
        q_row = p.q_i
    else:
        for hh in range(heads):
            copy = q + hh * count * q_row
            if dot:
                copy_pairs(source + hh * p.q_h, p.q_i, copy, q_row, count, p.dim, one)
            else:
                copy_rows(source + hh * p.q_h, p.q_i, copy, q_row, count, p.dim, p.kind, one)
    for hh in range(heads):
        top = cast(NEGATIVE_INFINITY, one)
        if p.has_sinks and split == 0:
            top = load_scalar(p.sinks + (h0 + hh) * size, one)
        seen = cast(1.0 if top != NEGATIVE_INFINITY else 0.0, one)
        for r in range(hh * count, (hh + 1) * count):
            store_scalar(m + r * size, top)
            store(l_parts + r * width, only_first(seen))
    lst = list_of(p, b, h0)
    ptr = p.row_ptr + (lst * (p.num_rows + 1) + row) * 4
    zero = cast(0.0, one)
    unit = cast(1.0, one)
    in_place = p.lazy and not values_are_copied(p, one)
    out_kind = p.kind if p.splits == 1 else 0
    repeat = False
    attempt = 0
    while attempt < 2:
        fill_zero(acc, rows * acc_vectors, one)
        for span in range(load_int32(ptr), load_int32(ptr + 4)):
            kind = load_int32(p.row_kind + span * 4)
            bitmap = load_int32(p.row_bits + span * 4)
            # an interval's edge crosses the tile: strips of rows, each as wide as its own rows see
            strip = STRIP if kind == INTERVAL and heads == 1 else rows
            tile_from = greater(load_int32(p.row_first + span * 4), tile_first)
            tile_to = lesser(load_int32(p.row_stop + span * 4), tile_stop)
            for tile in range(tile_from, tile_to):
                if p.lazy:
                    pack_first = tile
                    pack_tile(p, b, g, tile, keys, values, value_row, dot, one)
                for r in range(0, rows, strip):
                    ii = r if heads == 1 else 0
                    some = lesser(strip, rows - r) if heads == 1 else count
                    j0 = tile * p.tile_k
                    j1 = lesser(j0 + p.tile_k, p.len_k)
                    packed = keys + (tile - pack_first) * key_tile
                    v = values + (tile - (0 if in_place else pack_first)) * v_rows * value_row
                    if kind == INTERVAL:
                        j1 = lesser(j1, last_visible(p, lst, i0 + ii, some))
                        skip = greater(first_visible(p, lst, i0 + ii, some) - j0, 0) // n * n
                        j0 += skip
                        packed += skip * size
                        if dot:
                            v += skip // 2 * value_row
                        else:
                            v += skip * value_row
                    if j0 < j1:
                        key_step(
                            p, b, lst, h0, heads, i0 + ii, some, j0, j1 - j0, kind, bitmap, q + r * q_row,
                            q_row,
                            packed, v, value_row, s, visible, m + r * size, l_parts + r * width,
                            acc + r * acc_row, acc_row, 0 if attempt == 0 else shares + r * size,
                            rounded, plain_v, g, dot, one,
                        )  # fmt: skip

        # inf or NaN may be the overflow of a sum not yet normalised: such rows once more, with weights that
        # sum to 1; the others are done
        if attempt == 0:
            close_rows(l_parts, m, totals, shares, rows, one)
            repeat = has_nonfinite(acc, acc_row, rows, acc_vectors, one)
        for hh in range(heads):
            at = ((split * p.batch + b) * p.heads_q + h0 + hh) * p.len_q + i0
            target = p.out + split * p.out_split + b * p.out_b + (h0 + hh) * p.out_h + i0 * p.out_i
            for ii in range(count):
                r = hh * count + ii
                if attempt == 0:
                    store_scalar(p.m + (at + ii) * size, load_scalar(m + r * size, one))
                    store_scalar(p.l + (at + ii) * size, load_scalar(totals + r * size, one))
                done = True
                share = load_scalar(shares + r * size, one)
                if repeat:
                    if attempt == 0:
                        done = not has_nonfinite(acc + r * acc_row, 0, 1, acc_vectors, one)
                        store_scalar(again + r * size, zero if done else unit)
                    else:
                        done = load_scalar(again + r * size, one) != zero
                        share = unit
                share = share * cast(p.out_factor, one)
                if done:
                    store_row(acc + r * acc_row, target + ii * p.out_i, p.dim_v, share, out_kind, one)
                    if p.rest != 0:
                        rest = p.rest + (at + ii) * p.dim_v * 2
                        store_rest(acc + r * acc_row, rest, p.dim_v, share, p.kind, one)
        attempt += 1 if repeat else 2


@part()
def close_rows(l_parts, m, totals, shares, rows, one):
    """Write l and 1 / l of each row: 0, and so m, where it has seen nothing. Whole vectors of rows."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    zero = cast(0.0, one)
    zeros = splat(zero)
    ones = splat(cast(1.0, one))
    for r in range(0, rows, n):
        total = row_sums(l_parts + r * width, width, one)
        store(totals + r * size, total)
        store(shares + r * size, keep_where_equal(total, zero, zeros, div(ones, total)))
        store(m + r * size, keep_where_equal(total, zero, zeros, load(m + r * size, one)))


@part(static=("dot",))
def pack_tile(p, b, g, tile, keys, values, value_row, dot, one):
    """One key tile transposed, scaled and widened into ``keys``; its values into ``values`` unless in place.

    With ``dot`` both as pairs of bfloat16, keys along head_dim and values along the keys; the scale waits.
    """
    size = scalar_bytes(one)
    j0 = tile * p.tile_k
    count = lesser(p.tile_k, p.len_k - j0)
    k = p.k + b * p.k_b + g * p.k_h + j0 * p.k_j
    v = p.v + b * p.v_b + g * p.v_h + j0 * p.v_j
    if dot:
        pack_pairs_transposed(k, p.k_j, keys, p.tile_k * size, count, p.dim, one)
        pack_pairs_of_rows(v, p.v_j, values, value_row, count, p.dim_v, one)
    else:
        scale = cast(p.scale_before, one)
        pack_transposed(k, p.k_j, keys, p.tile_k * size, count, p.dim, scale, p.kind, one)
        if values_are_copied(p, one):
            copy_rows(v, p.v_j, values, value_row, count, p.dim_v, p.kind, one)


@part(types.boolean)
def values_are_copied(p, one):
    """Whether rows of v cannot be read where they are: stored in 16 bits, or no whole vectors."""
    return p.kind != 0 or p.dim_v % lanes(one) != 0


@jit
def forward_units(address, first, stop, scratch, one):
    """See ``_forward_units``."""
    _forward_units(address, first, stop, scratch, False, one)


@jit
def forward_units_of_pairs(address, first, stop, scratch, one):
    """The same with bfloat16 dot products, for processors that have them (`_host.HAS_BF16_DOT`)."""
    _forward_units(address, first, stop, scratch, True, one)


@part(static=("dot",))
def _forward_units(address, first, stop, scratch, dot, one):
    """Units first .. stop; rank = ((split * chunks + chunks - 1 - chunk) * batch + b) * heads_kv + g.

    By rank the costly ones come first (under a causal mask the last chunks). The team takes units from both
    ends, so they alternate between them, and what is left for the end, in the middle, is small.

    A chunk is a share of the query tiles. With few queries there is one, and the key tiles are cut into
    splits instead; `_merge` joins what they found.
    """
    p = params_at(address)
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    pairs = p.batch * p.heads_kv
    value_vectors = (p.dim_v + n - 1) // n
    q_row = (p.dim + n - 1) // n * width
    s_row = p.tile_k * size
    key_tile = p.dim * s_row
    v_rows = p.tile_k
    if dot:
        key_tile = (p.dim + 1) // 2 * s_row
        v_rows = p.tile_k // 2
    copied = values_are_copied(p, one)
    keys = scratch + p.tile_q * (2 * s_row + width + q_row + value_vectors * width)
    keys += 4 * p.tile_q * size  # m, shares, totals, again
    if dot:
        # plain_v, rounded, and plain_v in pairs again
        keys += p.tile_k * (value_vectors * width + p.tile_q * 2) + p.tile_k // 2 * value_vectors * width
    units = p.splits * p.chunks * pairs
    for unit in range(first, stop):
        rank = 2 * unit if 2 * unit < units else 2 * (units - unit) - 1
        split = rank // (p.chunks * pairs)
        chunk = p.chunks - 1 - rank // pairs % p.chunks
        b = rank % pairs // p.heads_kv
        g = rank % pairs % p.heads_kv
        row_first = p.num_rows * chunk // p.chunks
        row_stop = p.num_rows * (chunk + 1) // p.chunks
        tile_first = p.num_cols * split // p.splits
        tile_stop = p.num_cols * (split + 1) // p.splits
        # the key tiles this unit will see
        pack_first = p.num_cols
        pack_stop = 0
        heads_seen = p.group if p.list_heads > 1 else 1
        for h in range(g * p.group, g * p.group + heads_seen):
            lst = list_of(p, b, h)
            for row in range(row_first, row_stop):
                ptr = p.row_ptr + (lst * (p.num_rows + 1) + row) * 4
                low = load_int32(ptr)
                high = load_int32(ptr + 4)
                if low < high:
                    pack_first = lesser(pack_first, load_int32(p.row_first + low * 4))
                    pack_stop = greater(pack_stop, load_int32(p.row_stop + high * 4 - 4))
        if p.lazy:  # each key tile is used once: packed when its turn comes, and still in the L1 cache then
            pack_stop = pack_first + 1
        values = keys + greater(pack_stop - pack_first, 0) * key_tile
        value_row = value_vectors * width
        if not p.lazy:
            for tile in range(pack_first, pack_stop):
                at = tile - pack_first
                pack_tile(
                    p, b, g, tile, keys + at * key_tile, values + at * v_rows * value_row, value_row, dot, one
                )
        if not copied:
            values = p.v + b * p.v_b + g * p.v_h
            value_row = p.v_j
            if not p.lazy:
                values += pack_first * p.tile_k * p.v_j
        for h0 in range(g * p.group, (g + 1) * p.group, p.heads_together):
            heads = lesser(p.heads_together, (g + 1) * p.group - h0)
            for row in range(row_stop - 1, row_first - 1, -1):
                query_block(
                    p, b, g, h0, heads, row, split, tile_first, tile_stop, scratch, keys, values, value_row,
                    pack_first, dot, one,
                )  # fmt: skip


__all__ = ["forward_units", "forward_units_of_pairs"]
