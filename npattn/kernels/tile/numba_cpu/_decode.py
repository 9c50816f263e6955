"""Forward kernel for few queries: decoding, where reading keys and values once is all the work.

Loop order: a work unit is one split of the keys of one (batch element, key head). All query rows of the group
(its heads times len_q, at most tile_q) stand together in scratch and meet the keys in steps of up to tile_k::

    S = Q K^T     dot products with the key rows as they lie, no transposed copy (`_simd.dots`)
    P = exp(S - m)
    acc += P V

Both products go by runs of evenly spaced rows, so that keys and values are read where they are, a page table
or not. Rows stored in 16 bits, and rows that are no whole vectors, are widened into scratch step by step;
keys of 16 bits, under a few query rows, in the products themselves. Units write only rows of their own (of
their own split: `_merge` joins these), so nothing depends on the thread count.

Versions (Zen 4, one core, float32; GB/s of keys and values from memory, and where they fit, from cache):

=============================================== ============ ============ =============
rows and head_dim                               3 of 64      1 of 64      4 of 128
=============================================== ============ ============ =============
the forward kernel: keys transposed, matmul     9.3 / 27     10 / 34      9.4
dot products with the rows as they lie          12.6 / 32    13.7 / 50    9.6
the rows read in order first (``touched``)      16.1 / 25    19.9 / 43    15.3
=============================================== ============ ============ =============

Adding up a whole array reads 31 GB/s there. Sixteen rows of 512 bytes read side by side, as the products and
the second half of a wide row of values do, get 12: the processor's prefetchers follow few streams. Prefetch
instructions did not help (12.5 / 16 / 12 at best, at any distance, into either cache), nor did reading values
in order just before they are multiplied instead of with the keys (17.8 / 16.9 / 15.7).

Keys and values in 16 bits take as long as in 32 (3 rows: 17 ns a key against 16 from cache), as widening them
costs what reading half the bytes saves. A widened copy of everything at each call took 3 times as long for
bfloat16 and 8 for float16.

Pages of 16 tokens in order of the pool cost 1.1 times as much as one array, a call of attention included.
Pages drawn at random, none beside its neighbour, cost 2.0 times as much; with the pages of the next step
prefetched into the second-level cache 1.4 (head_dim 128) to 1.65 (64).
"""

from typing import Final

from numba import types

from npattn.kernels._jit import jit
from npattn.kernels._parts import part
from npattn.kernels._simd.dots import dots, dots_bfloat, dots_half
from npattn.kernels._simd.matmul import matmul
from npattn.kernels._simd.vectors import (
    add,
    cast,
    first,
    greater,
    hsum,
    lanes,
    lesser,
    load,
    load_int32,
    load_scalar,
    only_first,
    prefetch_2,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    vector_bytes,
)
from npattn.kernels.tile.numba_cpu._decode_params import params_at
from npattn.kernels.tile.numba_cpu._rows import (
    NEGATIVE_INFINITY,
    copy_rows,
    fill_zero,
    has_nonfinite,
    store_row,
)
from npattn.kernels.tile.numba_cpu._tile import (
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

LINE: Final = 64  # bytes of a cache line


@part("one")
def touched(address, row, rows, vectors, one):
    """Read rows of whole vectors in order; returns something that depends on all of them."""
    width = vector_bytes(one)
    a, b = splat(cast(0.0, one)), splat(cast(0.0, one))
    whole = vectors // 4 * 4
    for r in range(rows):
        at = address + r * row
        for c in range(0, whole * width, 4 * width):
            a = add(a, load(at + c, one))
            b = add(b, load(at + c + width, one))
            a = add(a, load(at + c + 2 * width, one))
            b = add(b, load(at + c + 3 * width, one))
        for c in range(whole * width, vectors * width, width):
            a = add(a, load(at + c, one))
    return first(add(a, b))


@part()
def row_products(q, q_row, k, k_row, k_ahead, k_kind, v, v_row, v_ahead, s, s_row, rows, keys, vectors, one):
    """s[r, j] = q[r] . k[j]; columns are padded to whole vectors with copies of the last.

    ``k_ahead`` and ``v_ahead``: so many vectors of each row are read in order before they are needed.
    """
    n = lanes(one)
    width = vector_bytes(one)
    for j in range(0, keys, n):
        last = lesser(n, keys - j) - 1
        at = s + j // n * width
        store_scalar(at, touched(k + j * k_row, k_row, last + 1, k_ahead, one))
        store_scalar(at, touched(v + j * v_row, v_row, last + 1, v_ahead, one))
        for r in range(rows):
            if k_kind == 0:
                store(at + r * s_row, dots(q + r * q_row, k + j * k_row, k_row, last, vectors, one))
            elif k_kind == 1:
                store(at + r * s_row, dots_half(q + r * q_row, k + j * k_row, k_row, last, vectors, one))
            else:
                store(at + r * s_row, dots_bfloat(q + r * q_row, k + j * k_row, k_row, last, vectors, one))


@part(types.intp)
def page_of(p, b, j):
    """The page that holds key j of batch element b."""
    return load_int32(p.page_table + b * p.page_row + j // p.page_size * 4)


@part(types.intp)
def run_end(p, b, j, stop):
    """Where rows from key j on stop being evenly spaced: at a page's end, unless its neighbour follows."""
    if p.page_size == 0:
        return stop
    end = (j // p.page_size + 1) * p.page_size
    while end < stop and p.pages_touch and page_of(p, b, end) == page_of(p, b, end - 1) + 1:
        end += p.page_size
    return lesser(end, stop)


@part(types.intp)
def key_at(p, b, g, j):
    """Where row j of the keys is."""
    if p.page_size == 0:
        return p.k + b * p.k_b + g * p.k_h + j * p.k_j
    return p.k + page_of(p, b, j) * p.k_b + g * p.k_h + j % p.page_size * p.k_j


@part(types.intp)
def value_at(p, b, g, j):
    """Where row j of the values is."""
    if p.page_size == 0:
        return p.v + b * p.v_b + g * p.v_h + j * p.v_j
    return p.v + page_of(p, b, j) * p.v_b + g * p.v_h + j % p.page_size * p.v_j


@part()
def add_values(s, visible, s_row, v, v_row, acc, acc_row, rows, vectors, count, garbage, one):
    """Acc += P V for ``count`` keys; ``garbage``: some of V is inf or NaN and may be masked."""
    size = scalar_bytes(one)
    if garbage:
        matmul_visible(s, visible, s_row, size, v, v_row, acc, acc_row, rows, vectors, count, one)
    else:
        matmul(s, s_row, size, v, v_row, acc, acc_row, rows, vectors, count, True, one)


@part()
def ask_for_pages(p, b, g, j0, j1):
    """Prefetch keys j0 .. j1 and their values, but for pages the processor's own prefetchers run into."""
    at = j0
    while at < j1:
        page = page_of(p, b, at)
        end = lesser((at // p.page_size + 1) * p.page_size, j1)
        if not p.pages_touch or page != page_of(p, b, at - 1) + 1:
            k = key_at(p, b, g, at)
            v = value_at(p, b, g, at)
            for r in range(end - at):
                for line in range(0, p.dim * p.item, LINE):
                    prefetch_2(k + r * p.k_j + line)
            for r in range(end - at):
                for line in range(0, p.dim_v * p.item, LINE):
                    prefetch_2(v + r * p.v_j + line)
        at = end


@part()
def keys_step(
    p, b, g, lst, j0, j1, ahead, kind, bitmap, q, q_row, keys, values, s, s_row, visible, m, l_parts, acc,
    acc_row, shares, one,
):  # fmt: skip
    """One step of the online softmax; ``shares`` is 0, or where each row's 1 / l stands once it is final.

    Keys up to ``ahead`` will follow.
    """
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    rows = p.group * p.len_q
    h0 = g * p.group
    vectors = (j1 - j0 + n - 1) // n
    q_vectors = (p.dim + n - 1) // n
    acc_vectors = (p.dim_v + n - 1) // n
    v_ahead = 0 if p.copies_values else acc_vectors
    if p.page_size != 0:
        ask_for_pages(p, b, g, j1, lesser(j1 + p.tile_k, ahead))
    at = j0
    while at < j1:
        end = run_end(p, b, at, j1)
        count = end - at
        k = key_at(p, b, g, at)
        v = value_at(p, b, g, at)
        if p.copies_values:
            store_scalar(s, touched(v, p.v_j, count, p.dim_v * p.item // width, one))
            copy_rows(v, p.v_j, values + (at - j0) * acc_row, acc_row, count, p.dim_v, p.kind_kv, one)
        if p.copies_keys:
            store_scalar(s, touched(k, p.k_j, count, p.dim * p.item // width, one))
            copy_rows(k, p.k_j, keys + (at - j0) * q_row, q_row, count, p.dim, p.kind_kv, one)
        else:
            row_products(
                q, q_row, k, p.k_j, p.dim * p.item // width, p.kind_kv, v, p.v_j, v_ahead,
                s + (at - j0) * size, s_row, rows, count, q_vectors, one,
            )  # fmt: skip
        at = end
    if p.copies_keys:
        row_products(q, q_row, keys, q_row, 0, 0, keys, 0, 0, s, s_row, rows, j1 - j0, q_vectors, one)
    garbage = finish_logits(
        p, b, lst, h0, p.group, 0, p.len_q, j0, j1 - j0, kind, bitmap, s, s_row, vectors, 0, one
    )
    if garbage:
        garbage = False
        at = j0
        while at < j1:
            end = j1 if p.copies_values else run_end(p, b, at, j1)
            v = values if p.copies_values else value_at(p, b, g, at)
            v_row = acc_row if p.copies_values else p.v_j
            garbage = garbage or has_nonfinite(v, v_row, end - at, acc_vectors, one)
            at = end
        if garbage:
            note_visible(s, s_row, visible, rows, vectors, one)
    online_softmax(s, s_row, m, l_parts, acc, acc_row, acc_vectors, rows, vectors, one)
    if shares != 0:
        for r in range(rows):
            scale_rows(s + r * s_row, s_row, 1, vectors, load_scalar(shares + r * size, one), one)
    if p.has_dropout:
        drop_rows(p, b, h0, p.group, 0, p.len_q, j0, s, s_row, vectors, one)
    at = j0
    while at < j1:
        end = j1 if p.copies_values else run_end(p, b, at, j1)
        v = values if p.copies_values else value_at(p, b, g, at)
        v_row = acc_row if p.copies_values else p.v_j
        column = (at - j0) * size
        add_values(
            s + column, visible + column, s_row, v, v_row, acc, acc_row, rows, acc_vectors, end - at, garbage,
            one,
        )  # fmt: skip
        at = end


@part()
def all_steps(
    p, b, g, tile_first, tile_stop, q, q_row, keys, values, s, s_row, visible, m, l_parts, acc, acc_row,
    shares, one,
):  # fmt: skip
    """The group's rows meet every key they may see in key tiles tile_first .. tile_stop."""
    lst = list_of(p, b, g * p.group)
    ptr = p.row_ptr + lst * (p.num_rows + 1) * 4
    for span in range(load_int32(ptr), load_int32(ptr + 4)):
        kind = load_int32(p.row_kind + span * 4)
        bitmap = load_int32(p.row_bits + span * 4)
        tile_from = greater(load_int32(p.row_first + span * 4), tile_first)
        tile_to = lesser(load_int32(p.row_stop + span * 4), tile_stop)
        ahead = lesser(tile_to * p.tile_k, p.len_k)
        if kind == INTERVAL:
            ahead = lesser(ahead, last_visible(p, lst, 0, p.len_q))
        for tile in range(tile_from, tile_to):
            j = tile * p.tile_k
            stop = lesser(j + p.tile_k, p.len_k)
            if kind == INTERVAL:
                stop = lesser(stop, last_visible(p, lst, 0, p.len_q))
                j = greater(j, first_visible(p, lst, 0, p.len_q))
            if j < stop:
                keys_step(
                    p, b, g, lst, j, stop, ahead, kind, bitmap, q, q_row, keys, values, s, s_row, visible, m,
                    l_parts, acc, acc_row, shares, one,
                )  # fmt: skip


@jit
def decode_units(address, first, stop, scratch, one):
    """See ``_decode_units``."""
    _decode_units(address, first, stop, scratch, one)


@part()
def _decode_units(address, first, stop, scratch, one):
    """Units first .. stop; unit = (split * batch + b) * heads_kv + g."""
    p = params_at(address)
    pairs = p.batch * p.heads_kv
    for unit in range(first, stop):
        split = unit // pairs
        b = unit % pairs // p.heads_kv
        _decode(p, b, unit % p.heads_kv, split, scratch, one)


@part()
def _decode(p, b, g, split, scratch, one):
    """One split of the keys of one (batch element, key head)."""
    n = lanes(one)
    size = scalar_bytes(one)
    width = vector_bytes(one)
    rows = p.group * p.len_q
    h0 = g * p.group
    tile_first = p.num_cols * split // p.splits
    tile_stop = p.num_cols * (split + 1) // p.splits
    acc_vectors = (p.dim_v + n - 1) // n
    q_vectors = (p.dim + n - 1) // n
    q_row = q_vectors * width
    acc_row = acc_vectors * width
    s_row = p.tile_k * size + width  # the last products of a page may reach beyond the tile
    numbers = (rows + n - 1) // n * width  # one number a row
    s = scratch
    visible = s + rows * s_row
    m = visible + rows * s_row
    shares = m + numbers
    again = shares + numbers
    l_parts = again + numbers
    q = l_parts + rows * width
    acc = q + rows * q_row
    keys = acc + rows * acc_row
    values = keys + p.tile_k * q_row

    for hh in range(p.group):
        source = p.q + b * p.q_b + (h0 + hh) * p.q_h
        copy_rows(source, p.q_i, q + hh * p.len_q * q_row, q_row, p.len_q, p.dim, p.kind, one)
        top = cast(NEGATIVE_INFINITY, one)
        if p.has_sinks and split == 0:
            top = load_scalar(p.sinks + (h0 + hh) * size, one)
        seen = cast(1.0 if top != NEGATIVE_INFINITY else 0.0, one)
        for r in range(hh * p.len_q, (hh + 1) * p.len_q):
            store_scalar(m + r * size, top)
            store(l_parts + r * width, only_first(seen))
    if p.scale_before != 1.0:
        scale_rows(q, q_row, rows, q_vectors, cast(p.scale_before, one), one)
    zero = cast(0.0, one)
    out_kind = p.kind if p.splits == 1 else 0
    repeat = False
    attempt = 0
    while attempt < 2:
        fill_zero(acc, rows * acc_vectors, one)
        all_steps(
            p, b, g, tile_first, tile_stop, q, q_row, keys, values, s, s_row, visible, m, l_parts, acc,
            acc_row, 0 if attempt == 0 else shares, one,
        )  # fmt: skip
        for r in range(rows):
            h = h0 + r // p.len_q
            i = r % p.len_q
            target = p.out + split * p.out_split + b * p.out_b + h * p.out_h + i * p.out_i
            if attempt == 0:
                total = hsum(load(l_parts + r * width, one))
                share = cast(1.0, one) / total if total != zero else zero
                at = (((split * p.batch + b) * p.heads_q + h) * p.len_q + i) * size
                store_scalar(p.m + at, load_scalar(m + r * size, one) if total != zero else zero)
                store_scalar(p.l + at, total)
                store_scalar(shares + r * size, share)
                # inf or NaN may be the overflow of a sum not yet normalised: such rows once more, with
                # weights that sum to 1; the others are done
                failed = has_nonfinite(acc + r * acc_row, 0, 1, acc_vectors, one)
                store_scalar(again + r * size, cast(1.0, one) if failed else zero)
                repeat = repeat or failed
                if not failed:
                    store_row(acc + r * acc_row, target, p.dim_v, share, out_kind, one)
            elif load_scalar(again + r * size, one) != zero:
                store_row(acc + r * acc_row, target, p.dim_v, cast(1.0, one), out_kind, one)
        attempt += 1 if repeat else 2


__all__ = ["decode_units"]
