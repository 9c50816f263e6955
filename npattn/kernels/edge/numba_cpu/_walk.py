"""The walks over edges, one work item each: forward, weights, and backward by receiving and by sending node.

Order of loops, the same in all: the nodes of an item (one thread owns them and alone writes their rows), a
node's edges by chunks of CHUNK, inside a chunk first all logits as vectors of (edge, head) pairs, then the
softmax on those vectors, then the weighted sum of gathered rows with the sums in registers. An item that is one
part of a hub does the same over its share of the edges and writes to a row of its own, merged afterwards.

Arrays are addresses, q, k, v and dout of (nodes, heads, head_dim) elements in C order. ``p`` is the record of a
call (`_call.CALL`), ``work`` this thread's scratch, ``one`` a scalar whose type is the accumulation dtype.
"""

from typing import Any

import numba
from numba import types

from npattn.kernels._jit import helper, jit
from npattn.kernels._simd.exp import exp, tanh
from npattn.kernels._simd.vectors import (
    add,
    div,
    fma,
    hsum,
    keep_between,
    keep_where_equal,
    lanes,
    load,
    load_scalar,
    maximum,
    mul,
    record_reader,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    sub,
    vector_bytes,
)
from npattn.kernels.edge.numba_cpu._call import ADDITIVE, CALL, CHUNK, DOT, DYNAMIC
from npattn.kernels.edge.numba_cpu._lanes import (
    UNIT_BYTES,
    accumulate_1,
    accumulate_1_masked,
    accumulate_4,
    accumulate_4_masked,
    accumulate_8,
    accumulate_att_1,
    accumulate_att_4,
    accumulate_dynamic_1,
    accumulate_dynamic_4,
    drop_pairs,
    fold_max_1,
    fold_max_2,
    fold_max_4,
    fold_max_8,
    fold_sum_1,
    fold_sum_2,
    fold_sum_4,
    fold_sum_8,
    gather,
    lane_dots,
    lane_dynamic,
    leaky,
    load_int64,
    load_node,
    slope_where,
)

_read = record_reader(numba.from_dtype(CALL))
_SCALE, _SOFTCAP, _SLOPE, _KEEP_FACTOR, _MINUS_INF = range(5)


@helper("one")
def _constant(p: Any, index: Any, one: Any) -> Any:
    return load_scalar(p.constants + index * scalar_bytes(one), one)


@helper()
def _zero(place: Any, vectors: Any, one: Any) -> None:
    for n in range(vectors):
        store(place + n * vector_bytes(one), splat(one - one))


# --- pairs of (edge, head) ----------------------------------------------------------------------------------


@helper()
def _list_lanes(p: Any, table: Any, base: Any, head_offsets: Any, one: Any) -> None:
    """Lane addresses of one node: ``table[t] = base + head_offsets[t]``."""
    for t in range(lanes(one)):
        store_scalar(table + 8 * t, base + load_int64(head_offsets + 8 * t))


@helper()
def _list_pairs(p: Any, table: Any, rows: Any, edge: Any, count: Any, head_offsets: Any, one: Any) -> None:
    """Lane addresses of the pairs from ``edge`` on; past the chunk's end its last edge is repeated."""
    for t in range(lanes(one)):
        e = min(edge + (t >> p.heads_log), count - 1)
        store_scalar(table + 8 * t, load_int64(rows + 8 * e) + load_int64(head_offsets + 8 * t))


@helper()
def _spread(p: Any, place: Any, row: Any, one: Any) -> None:
    """Repeat the heads' values at ``row`` over the lanes."""
    size = scalar_bytes(one)
    for t in range(lanes(one)):
        head = min(t & (p.heads_padded - 1), p.heads - 1)
        store_scalar(place + t * size, load_scalar(row + head * size, one))


@helper("one")
def _fold_max(p: Any, x: Any) -> Any:
    """The maximum over the lanes of one head, in each of them."""
    if p.heads_padded <= 1:
        x = fold_max_1(x)
    if p.heads_padded <= 2:
        x = fold_max_2(x)
    if p.heads_padded <= 4:
        x = fold_max_4(x)
    if p.heads_padded <= 8:
        x = fold_max_8(x)
    return x


@helper("one")
def _fold_sum(p: Any, x: Any) -> Any:
    """The sum over the lanes of one head, in each of them."""
    if p.heads_padded <= 1:
        x = fold_sum_1(x)
    if p.heads_padded <= 2:
        x = fold_sum_2(x)
    if p.heads_padded <= 4:
        x = fold_sum_4(x)
    if p.heads_padded <= 8:
        x = fold_sum_8(x)
    return x


@helper()
def _edge_words(p: Any, work: Any, edge: Any, count: Any, one: Any) -> None:
    """The dropout generator's i and j of every lane: the edge number's upper and lower 32 bits."""
    for t in range(lanes(one)):
        number = load_int64(work + p.edges + 8 * min(edge + (t >> p.heads_log), count - 1))
        store_scalar(work + p.edge_high + 4 * t, numba.int32(number >> 32))
        store_scalar(work + p.edge_low + 4 * t, numba.int32(number & 0xFFFFFFFF))


@helper("one")
def _drop(p: Any, work: Any, one: Any, x: Any) -> Any:
    return drop_pairs(
        x,
        p.hash_0,
        p.hash_1,
        work + p.edge_high,
        work + p.edge_low,
        p.threshold,
        _constant(p, _KEEP_FACTOR, one),
    )


# --- a chunk of edges -----------------------------------------------------------------------------------------


@helper()
def _project(p: Any, rows: Any, buffer: Any, edges: Any, count: Any, one: Any) -> None:
    """Replace listed rows by copies with the projected edge features added: ke and ve of the contract."""
    size, width = scalar_bytes(one), lanes(one)
    length = p.heads * p.head_dim
    for e in range(count):
        row, copy = load_int64(rows + 8 * e), buffer + e * p.edge_row
        feature = p.features + load_int64(edges + 8 * e) * p.edge_dim * size
        whole = length - length % width
        for d in range(0, whole, width):
            store(copy + d * size, load(row + d * size, one))
        for d in range(whole, length):
            store_scalar(copy + d * size, load_scalar(row + d * size, one))
        for c in range(p.edge_dim):
            factor = splat(load_scalar(feature + c * size, one))
            weight = p.edge_weight + c * p.edge_row
            for d in range(0, length, width):
                place = copy + d * size
                store(place, fma(factor, load(weight + d * size, one), load(place, one)))
        store_scalar(rows + 8 * e, copy)


@helper()
def _list_sources(p: Any, work: Any, slot: Any, count: Any, one: Any) -> None:
    """Row addresses of the sending nodes' keys and values, and edge numbers, of a chunk of slots."""
    for e in range(count):
        node = load_node(p.row_source + 4 * (slot + e))
        store_scalar(work + p.key_rows + 8 * e, p.k + node * p.k_node)
        store_scalar(work + p.value_rows + 8 * e, p.v + node * p.v_node)
    if p.needs_edges:
        for e in range(count):
            edge = load_int64(p.row_edge + 8 * (slot + e))
            store_scalar(work + p.edges + 8 * e, edge)
            store_scalar(work + p.bias_rows + 8 * e, p.bias + edge * p.bias_edge)
    if p.edge_dim > 0:
        _project(p, work + p.key_rows, work + p.key_buffer, work + p.edges, count, one)
        if p.score == DOT:
            _project(p, work + p.value_rows, work + p.value_buffer, work + p.edges, count, one)


@helper()
def _logits(p: Any, work: Any, count: Any, one: Any) -> None:
    """The chunk's logits, −inf where masked or past the end; what the backward of the score needs beside."""
    width, vector = lanes(one), vector_bytes(one)
    slope, minus_inf = _constant(p, _SLOPE, one), _constant(p, _MINUS_INF, one)
    hidden = splat(minus_inf)
    pairs = count << p.heads_log
    for pair in range(0, pairs, width):
        edge = pair >> p.heads_log
        place = (pair // width) * vector
        _list_pairs(p, work + p.key_lanes, work + p.key_rows, edge, count, p.key_heads, one)
        bias = splat(one - one)
        if p.has_bias:
            _list_pairs(p, work + p.bias_lanes, work + p.bias_rows, edge, count, p.bias_heads, one)
            bias = gather(work + p.bias_lanes, one)
        if p.score == DOT:
            x = lane_dots(work + p.query_lanes, work + p.key_lanes, 0, p.head_dim, slope, one)
            x = mul(x, splat(_constant(p, _SCALE, one)))
            if p.has_softcap:
                cap = splat(_constant(p, _SOFTCAP, one))
                x = mul(cap, tanh(div(x, cap)))
            store(work + p.inner + place, x)
            x = add(x, bias)
        elif p.score == ADDITIVE:
            x = add(gather(work + p.query_lanes, one), gather(work + p.key_lanes, one))
            x = add(x, bias)
            store(work + p.inner + place, x)
            x = leaky(x, slope)
        else:
            x = lane_dynamic(
                work + p.query_lanes, work + p.key_lanes, work + p.att_lanes, p.head_dim, slope, one
            )
        if p.has_bias:
            x = keep_where_equal(bias, minus_inf, hidden, x)
        store(work + p.logits + place, keep_between(x, hidden, pair, 0, pairs))


@helper()
def _sum_rows(p: Any, acc: Any, table: Any, units: Any, tail: Any, rows: Any, w: Any, count: Any, one: Any) -> None:
    """``acc[u] += w[e, head of u] * row e`` for all units u of a row."""
    vector, step = vector_bytes(one), p.heads_padded * scalar_bytes(one)
    u = 0
    if tail:
        while u + 4 <= units:
            accumulate_4_masked(
                acc + u * vector, 0, table + u * UNIT_BYTES, rows, w, step, count, 0, one
            )
            u += 4
        while u < units:
            accumulate_1_masked(
                acc + u * vector, 0, table + u * UNIT_BYTES, rows, w, step, count, 0, one
            )
            u += 1
        return
    while u + 8 <= units:
        accumulate_8(acc + u * vector, 0, table + u * UNIT_BYTES, rows, w, step, count, 0, one)
        u += 8
    while u + 4 <= units:
        accumulate_4(acc + u * vector, 0, table + u * UNIT_BYTES, rows, w, step, count, 0, one)
        u += 4
    while u < units:
        accumulate_1(acc + u * vector, 0, table + u * UNIT_BYTES, rows, w, step, count, 0, one)
        u += 1


@helper()
def _sum_visible(
    p: Any, work: Any, acc: Any, table: Any, blocks: Any, rows: Any, w: Any, count: Any, one: Any
) -> None:
    """``_sum_rows`` head by head over the pairs of nonzero weight only: a masked row may hold NaN."""
    size, vector = scalar_bytes(one), vector_bytes(one)
    for head in range(p.heads):
        n = 0
        for e in range(count):
            weight = load_scalar(w + (e * p.heads_padded + head) * size, one)
            if weight != 0:
                store_scalar(work + p.visible_rows + 8 * n, load_int64(rows + 8 * e))
                store_scalar(work + p.visible_weights + n * size, weight)
                n += 1
        for u in range(head * blocks, (head + 1) * blocks):
            accumulate_1_masked(
                acc + u * vector,
                0,
                table + u * UNIT_BYTES,
                work + p.visible_rows,
                work + p.visible_weights - head * size,
                size,
                n,
                0,
                one,
            )


@helper()
def _sum_keys(p: Any, work: Any, acc: Any, rows: Any, w: Any, count: Any, one: Any) -> None:
    """Weighted sum of rows with key's features (k or q)."""
    if p.is_masked:
        _sum_visible(p, work, acc, p.key_units, p.key_blocks, rows, w, count, one)
    else:
        units = p.heads * p.key_blocks
        _sum_rows(p, acc, p.key_units, units, p.key_tail, rows, w, count, one)


@helper()
def _sum_values(p: Any, work: Any, acc: Any, rows: Any, w: Any, count: Any, one: Any) -> None:
    """Weighted sum of rows with value's features (v or dout)."""
    if p.is_masked:
        _sum_visible(p, work, acc, p.value_units, p.value_blocks, rows, w, count, one)
    else:
        units = p.heads * p.value_blocks
        _sum_rows(p, acc, p.value_units, units, p.value_tail, rows, w, count, one)


@helper()
def _sum_slopes(
    p: Any, acc: Any, acc_att: Any, rows: Any, w: Any, count: Any, own: Any, slope: Any, one: Any
) -> None:
    """``acc += w * slope(own + row)``, and ``acc_att += w * leaky_relu(own + row)`` unless it is 0."""
    vector, step, units = vector_bytes(one), p.heads_padded * scalar_bytes(one), p.heads * p.key_blocks
    u = 0
    while u + 4 <= units:
        a, b, table = acc + u * vector, acc_att + u * vector, p.key_units + u * UNIT_BYTES
        if acc_att != 0:
            accumulate_att_4(a, b, table, rows, w, step, count, own, slope)
        else:
            accumulate_dynamic_4(a, b, table, rows, w, step, count, own, slope)
        u += 4
    while u < units:
        a, b, table = acc + u * vector, acc_att + u * vector, p.key_units + u * UNIT_BYTES
        if acc_att != 0:
            accumulate_att_1(a, b, table, rows, w, step, count, own, slope)
        else:
            accumulate_dynamic_1(a, b, table, rows, w, step, count, own, slope)
        u += 1


@helper()
def _write_unit(place: Any, vector: Any, count: Any, work: Any, one: Any) -> None:
    """Store the first ``count`` lanes."""
    if count == lanes(one):
        store(place, vector)
        return
    size = scalar_bytes(one)
    store(work, vector)
    for d in range(count):
        store_scalar(place + d * size, load_scalar(work + d * size, one))


@helper()
def _write_rows(row: Any, acc: Any, table: Any, units: Any, factors: Any, work: Any, one: Any) -> None:
    """Write units to a row of (heads, features); ``factors`` holds one per unit (0: none)."""
    vector, size = vector_bytes(one), scalar_bytes(one)
    for u in range(units):
        x = load(acc + u * vector, one)
        if factors != 0:
            head = load_int64(table + u * UNIT_BYTES + 8)  # byte offset of the head's number
            x = mul(x, splat(load_scalar(factors + head, one)))
        offset, count = load_int64(table + u * UNIT_BYTES), load_int64(table + u * UNIT_BYTES + 16)
        _write_unit(row + offset, x, count, work, one)


@helper(types.UniTuple(types.int64, 2))
def _edges_of(ptr: Any, node: Any, part: Any, begin: Any, end: Any) -> Any:
    """The range of edges of a node in this item."""
    if part >= 0:
        return begin, end
    return load_int64(ptr + 8 * node), load_int64(ptr + 8 * node + 8)


@helper(types.UniTuple(types.int64, 5))
def _item(items: Any, item: Any) -> Any:
    row = items + 40 * item
    return (
        load_int64(row),
        load_int64(row + 8),
        load_int64(row + 16),
        load_int64(row + 24),
        load_int64(row + 32),
    )


# --- forward --------------------------------------------------------------------------------------------------


@jit
def forward_item(address: Any, item: Any, part_row: Any, work: Any, one: Any) -> None:
    """Out, m and l of an item's nodes; for a part of a hub its unnormalised sums in row ``part_row``."""
    p = _read(address)
    size, width, vector = scalar_bytes(one), lanes(one), vector_bytes(one)
    minus_inf, zero = splat(_constant(p, _MINUS_INF, one)), splat(one - one)
    first, stop, begin, end, part = _item(p.row_items, item)
    units = p.heads * p.value_blocks
    _list_lanes(p, work + p.att_lanes, p.att, p.att_heads, one)
    for node in range(first, stop):
        lo, hi = _edges_of(p.row_ptr, node, part, begin, end)
        _list_lanes(p, work + p.query_lanes, p.q + node * p.q_node, p.query_heads, one)
        m, l = minus_inf, zero
        _zero(work + p.acc, units, one)
        for slot in range(lo, hi, CHUNK):
            count = min(CHUNK, hi - slot)
            _list_sources(p, work, slot, count, one)
            _logits(p, work, count, one)
            pairs = count << p.heads_log
            highest = minus_inf
            for pair in range(0, pairs, width):
                highest = maximum(load(work + p.logits + pair * size, one), highest)
            m_new = maximum(_fold_max(p, highest), m)
            pivot = keep_where_equal(m_new, _constant(p, _MINUS_INF, one), zero, m_new)
            alpha = exp(sub(m, pivot))
            l = mul(l, alpha)
            m = m_new
            for pair in range(0, pairs, width):
                x = exp(sub(load(work + p.logits + pair * size, one), pivot))
                l = add(l, x)
                if p.has_dropout:
                    _edge_words(p, work, pair >> p.heads_log, count, one)
                    x = _drop(p, work, one, x)
                store(work + p.weights + pair * size, x)
            if slot > lo:
                store(work + p.alpha, alpha)
                for u in range(units):
                    head = load_int64(p.value_units + u * UNIT_BYTES + 8)
                    place = work + p.acc + u * vector
                    store(place, mul(load(place, one), splat(load_scalar(work + p.alpha + head, one))))
            _sum_values(p, work, work + p.acc, work + p.value_rows, work + p.weights, count, one)
        store(work + p.alpha, keep_where_equal(m, _constant(p, _MINUS_INF, one), zero, m))
        store(work + p.alpha_2, _fold_sum(p, l))
        row, m_row, l_row = p.out + node * p.v_node, p.m + node * p.m_node, p.l + node * p.m_node
        if part >= 0:
            row, m_row, l_row = (
                p.part_out + part_row * p.v_node,
                p.part_m + part_row * p.m_node,
                p.part_l + part_row * p.m_node,
            )
        for head in range(p.heads):
            total = load_scalar(work + p.alpha_2 + head * size, one)
            store_scalar(m_row + head * size, load_scalar(work + p.alpha + head * size, one))
            store_scalar(l_row + head * size, total)
            if total != 0 and part < 0:
                total = one / total
            elif part >= 0:
                total = one
            store_scalar(work + p.alpha_2 + head * size, total)
        _write_rows(row, work + p.acc, p.value_units, units, work + p.alpha_2, work + p.spare, one)


@helper()
def _node_softmax(p: Any, work: Any, node: Any, one: Any) -> None:
    """The node's m and 1 / l in every lane."""
    size = scalar_bytes(one)
    for head in range(p.heads):
        total = load_scalar(p.l + node * p.m_node + head * size, one)
        if total != 0:
            total = one / total
        store_scalar(work + p.spare + head * size, total)
    _spread(p, work + p.l_lanes, work + p.spare, one)
    _spread(p, work + p.m_lanes, p.m + node * p.m_node, one)


@jit
def weights_item(address: Any, item: Any, work: Any, one: Any) -> None:
    """The softmax weights of an item's edges, written in the caller's edge order."""
    p = _read(address)
    size, width = scalar_bytes(one), lanes(one)
    first, stop, begin, end, part = _item(p.row_items, item)
    _list_lanes(p, work + p.att_lanes, p.att, p.att_heads, one)
    for node in range(first, stop):
        lo, hi = _edges_of(p.row_ptr, node, part, begin, end)
        _list_lanes(p, work + p.query_lanes, p.q + node * p.q_node, p.query_heads, one)
        _node_softmax(p, work, node, one)
        for slot in range(lo, hi, CHUNK):
            count = min(CHUNK, hi - slot)
            _list_sources(p, work, slot, count, one)
            _logits(p, work, count, one)
            for pair in range(0, count << p.heads_log, width):
                x = exp(sub(load(work + p.logits + pair * size, one), load(work + p.m_lanes, one)))
                store(work + p.weights + pair * size, mul(x, load(work + p.l_lanes, one)))
            for e in range(count):
                row = p.edge_out + load_int64(work + p.edges + 8 * e) * p.m_node
                for head in range(p.heads):
                    weight = work + p.weights + (e * p.heads_padded + head) * size
                    store_scalar(row + head * size, load_scalar(weight, one))


# --- backward -------------------------------------------------------------------------------------------------


@helper()
def _edge_gradients(p: Any, work: Any, node: Any, count: Any, item: Any, one: Any) -> None:
    """dedge_features of a chunk, and its part of the item's dedge_weight: both from dke (+ dve)."""
    size, width = scalar_bytes(one), lanes(one)
    length = p.heads * p.head_dim
    slope = _constant(p, _SLOPE, one)
    q, dout, gradient = p.q + node * p.q_node, p.dout + node * p.v_node, work + p.edge_gradient
    for e in range(count):
        key = load_int64(work + p.key_rows + 8 * e)
        for head in range(p.heads):
            pair = (e * p.heads_padded + head) * size
            ds, pd = load_scalar(work + p.ds + pair, one), load_scalar(work + p.weights + pair, one)
            for d in range(head * p.head_dim, (head + 1) * p.head_dim):
                if ds == 0 and pd == 0:  # masked: q and dout may hold NaN
                    x = one - one
                elif p.score == DOT:
                    x = ds * load_scalar(q + d * size, one) + pd * load_scalar(dout + d * size, one)
                else:
                    x = ds * load_scalar(p.att + d * size, one)
                    if not load_scalar(q + d * size, one) + load_scalar(key + d * size, one) > 0:
                        x *= slope
                store_scalar(gradient + d * size, x)
        edge = load_int64(work + p.edges + 8 * e)
        for c in range(p.edge_dim):
            weight, dweight = p.edge_weight + c * p.edge_row, p.dedge_weight + (item * p.edge_dim + c) * p.edge_row
            factor = splat(load_scalar(p.features + (edge * p.edge_dim + c) * size, one))
            total = splat(one - one)
            for d in range(0, length, width):
                x = load(gradient + d * size, one)
                total = fma(x, load(weight + d * size, one), total)
                store(dweight + d * size, fma(factor, x, load(dweight + d * size, one)))
            store_scalar(p.dfeatures + (edge * p.edge_dim + c) * size, hsum(total))


@jit
def backward_target_item(address: Any, item: Any, part_row: Any, work: Any, one: Any) -> None:
    """dq of an item's receiving nodes; pd and ds of their edges for the other walk; what belongs to edges."""
    p = _read(address)
    size, width, vector = scalar_bytes(one), lanes(one), vector_bytes(one)
    slope, minus_inf, zero = _constant(p, _SLOPE, one), _constant(p, _MINUS_INF, one), splat(one - one)
    scale, cap = splat(_constant(p, _SCALE, one)), splat(_constant(p, _SOFTCAP, one))
    first, stop, begin, end, part = _item(p.row_items, item)
    units = p.heads * p.key_blocks
    _list_lanes(p, work + p.att_lanes, p.att, p.att_heads, one)
    _zero(work + p.acc_2, units, one)  # the item's share of datt
    _zero(work + p.edge_gradient, p.edge_row // vector, one)  # its padding is read
    for node in range(first, stop):
        lo, hi = _edges_of(p.row_ptr, node, part, begin, end)
        _list_lanes(p, work + p.query_lanes, p.q + node * p.q_node, p.query_heads, one)
        _list_lanes(p, work + p.dout_lanes, p.dout + node * p.v_node, p.value_heads, one)
        _list_lanes(p, work + p.value_lanes, p.out + node * p.v_node, p.value_heads, one)
        delta = lane_dots(work + p.dout_lanes, work + p.value_lanes, 0, p.head_dim_v, slope, one)
        _node_softmax(p, work, node, one)
        m, l = load(work + p.m_lanes, one), load(work + p.l_lanes, one)
        _zero(work + p.acc, units, one)
        dscore = zero
        for slot in range(lo, hi, CHUNK):
            count = min(CHUNK, hi - slot)
            _list_sources(p, work, slot, count, one)
            _logits(p, work, count, one)
            for pair in range(0, count << p.heads_log, width):
                edge, place = pair >> p.heads_log, pair * size
                _list_pairs(p, work + p.value_lanes, work + p.value_rows, edge, count, p.value_heads, one)
                dp = lane_dots(work + p.dout_lanes, work + p.value_lanes, 0, p.head_dim_v, slope, one)
                logit = load(work + p.logits + place, one)
                x = mul(exp(sub(logit, m)), l)
                pd = x
                if p.has_dropout:
                    _edge_words(p, work, edge, count, one)
                    pd, dp = _drop(p, work, one, x), _drop(p, work, one, dp)
                ds = keep_where_equal(logit, minus_inf, zero, mul(x, sub(dp, delta)))
                if p.score == DOT:
                    store(work + p.spare_pairs + place, ds)  # dbias
                    if p.has_softcap:
                        bent = div(load(work + p.inner + place, one), cap)
                        ds = mul(ds, sub(splat(one), mul(bent, bent)))
                    ds = mul(ds, scale)
                elif p.score == ADDITIVE:
                    ds = slope_where(load(work + p.inner + place, one), ds, slope)
                    store(work + p.spare_pairs + place, ds)
                    dscore = add(dscore, ds)
                store(work + p.ds + place, ds)
                store(work + p.weights + place, keep_where_equal(logit, minus_inf, zero, pd))
            for e in range(count):
                row, pair = p.edge_pairs + (slot + e) * 2 * p.heads * size, e * p.heads_padded * size
                for head in range(p.heads):
                    at = pair + head * size
                    store_scalar(row + head * size, load_scalar(work + p.weights + at, one))
                    store_scalar(row + (p.heads + head) * size, load_scalar(work + p.ds + at, one))
            if p.has_bias:
                for e in range(count):
                    row = p.edge_out + load_int64(work + p.edges + 8 * e) * p.m_node
                    for head in range(p.heads):
                        at = work + p.spare_pairs + (e * p.heads_padded + head) * size
                        store_scalar(row + head * size, load_scalar(at, one))
            if p.score == DOT:
                _sum_keys(p, work, work + p.acc, work + p.key_rows, work + p.ds, count, one)
            elif p.score == DYNAMIC:
                own = p.q + node * p.q_node
                _sum_slopes(
                    p,
                    work + p.acc,
                    work + p.acc_2,
                    work + p.key_rows,
                    work + p.ds,
                    count,
                    own,
                    slope,
                    one,
                )
            if p.edge_dim > 0:
                _edge_gradients(p, work, node, count, item, one)
        row = p.dq + node * p.q_node
        if part >= 0:
            row = p.part_out + part_row * p.q_node
        if p.score == ADDITIVE:
            store(work + p.acc, _fold_sum(p, dscore))
            for head in range(p.heads):
                store_scalar(row + head * size, load_scalar(work + p.acc + head * size, one))
        else:
            if p.score == DYNAMIC:
                _times_att(p, work, one)
            _write_rows(row, work + p.acc, p.key_units, units, 0, work + p.spare, one)
    if p.score == DYNAMIC:
        row = p.datt + item * p.heads * p.head_dim * size
        _write_rows(row, work + p.acc_2, p.key_units, units, 0, work + p.spare, one)


@helper()
def _times_att(p: Any, work: Any, one: Any) -> None:
    """acc *= att."""
    size = scalar_bytes(one)
    for u in range(p.heads * p.key_blocks):
        offset, count = load_int64(p.key_units + u * UNIT_BYTES), load_int64(p.key_units + u * UNIT_BYTES + 16)
        for d in range(count):
            place = work + p.acc + u * vector_bytes(one) + d * size
            store_scalar(place, load_scalar(place, one) * load_scalar(p.att + offset + d * size, one))


@jit
def backward_source_item(address: Any, item: Any, part_row: Any, work: Any, one: Any) -> None:
    """dk and dv of an item's sending nodes, from the pd and ds of their edges."""
    p = _read(address)
    size, width = scalar_bytes(one), lanes(one)
    slope, zero = _constant(p, _SLOPE, one), splat(one - one)
    first, stop, begin, end, part = _item(p.col_items, item)
    key_units, value_units = p.heads * p.key_blocks, p.heads * p.value_blocks
    # padded heads are never written by the loops below, and their weights must not be garbage
    _zero(work + p.weights, CHUNK * p.heads_padded // width + 1, one)
    _zero(work + p.ds, CHUNK * p.heads_padded // width + 1, one)
    for node in range(first, stop):
        lo, hi = _edges_of(p.col_ptr, node, part, begin, end)
        _zero(work + p.acc, key_units, one)
        _zero(work + p.acc_2, value_units, one)
        dscore = zero
        for place in range(lo, hi, CHUNK):
            count = min(CHUNK, hi - place)
            for e in range(count):
                target = load_node(p.col_target + 4 * (place + e))
                store_scalar(work + p.key_rows + 8 * e, p.q + target * p.q_node)
                store_scalar(work + p.value_rows + 8 * e, p.dout + target * p.v_node)
                slot = load_int64(p.col_slot + 8 * (place + e))
                row, pair = p.edge_pairs + slot * 2 * p.heads * size, e * p.heads_padded * size
                for head in range(p.heads):
                    at = pair + head * size
                    store_scalar(work + p.weights + at, load_scalar(row + head * size, one))
                    store_scalar(work + p.ds + at, load_scalar(row + (p.heads + head) * size, one))
                if p.edge_dim > 0:
                    store_scalar(work + p.edges + 8 * e, load_int64(p.row_edge + 8 * slot))
            _sum_values(p, work, work + p.acc_2, work + p.value_rows, work + p.weights, count, one)
            if p.score == DOT:
                _sum_keys(p, work, work + p.acc, work + p.key_rows, work + p.ds, count, one)
            elif p.score == DYNAMIC:
                if p.edge_dim > 0:
                    _project(p, work + p.key_rows, work + p.key_buffer, work + p.edges, count, one)
                own = p.k + node * p.k_node
                _sum_slopes(
                    p, work + p.acc, 0, work + p.key_rows, work + p.ds, count, own, slope, one
                )
            else:
                pairs = count << p.heads_log
                for pair in range(0, pairs, width):
                    ds = keep_between(load(work + p.ds + pair * size, one), zero, pair, 0, pairs)
                    dscore = add(dscore, ds)
        dk_row, dv_row = p.dk + node * p.k_node, p.dv + node * p.v_node
        if part >= 0:
            dk_row, dv_row = p.part_out + part_row * p.k_node, p.part_dv + part_row * p.v_node
        if p.score == ADDITIVE:
            store(work + p.acc, _fold_sum(p, dscore))
            for head in range(p.heads):
                store_scalar(dk_row + head * size, load_scalar(work + p.acc + head * size, one))
        else:
            if p.score == DYNAMIC:
                _times_att(p, work, one)
            _write_rows(dk_row, work + p.acc, p.key_units, key_units, 0, work + p.spare, one)
        _write_rows(dv_row, work + p.acc_2, p.value_units, value_units, 0, work + p.spare, one)
