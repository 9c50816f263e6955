"""The walks over edges, one work item each: forward, weights, backward by receiving and by sending node.

Order of loops, the same in all: the nodes of an item (one thread owns them and alone writes their rows), a
node's edges by chunks of CHUNK, inside a chunk first all logits as vectors of (edge, head) pairs, then the
softmax on those vectors, then the weighted sum of gathered rows with the sums in registers. An item that is
one part of a hub does the same over its share of the edges and writes to a row of its own, merged afterwards.

Arrays are addresses, q, k, v and dout of (nodes, heads, head_dim) elements in C order. ``p`` is the record of
a call (`_call.CALL`), ``work`` this thread's scratch, ``one`` a scalar whose type is the accumulation dtype.
"""

from typing import Any

import numba
from numba import types

from npattn.kernels._jit import jit
from npattn.kernels._parts import part
from npattn.kernels._simd.exp import exp, tanh
from npattn.kernels._simd.vectors import (
    add,
    div,
    fma,
    hsum,
    keep_between,
    keep_where_equal,
    lanes,
    lesser,
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
    copy_heads,
    drop_pairs,
    edges_per_vector,
    fold_max,
    fold_sum,
    gather_heads,
    lane_dots,
    lane_dynamic,
    leaky,
    load_int64,
    load_node,
    padded_heads,
    slope_where,
    spread_heads,
)

_read = record_reader(numba.from_dtype(CALL))
_SCALE, _SOFTCAP, _SLOPE, _KEEP_FACTOR, _MINUS_INF = range(5)


@part("one")
def _constant(p: Any, index: Any, one: Any) -> Any:
    return load_scalar(p.constants + index * scalar_bytes(one), one)


@part()
def _zero(place: Any, vectors: Any, one: Any) -> None:
    for n in range(vectors):
        store(place + n * vector_bytes(one), splat(one - one))


# --- a chunk of edges ---------------------------------------------------------------------------------------


@part()
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


@part()
def _repeat_last(rows: Any, count: Any, pairs: Any, one: Any) -> None:
    """Fill a list up to whole vectors of pairs."""
    group = edges_per_vector(pairs, one)
    last = load_int64(rows + 8 * (count - 1))
    for e in range(count, (count + group - 1) // group * group):
        store_scalar(rows + 8 * e, last)


@part()
def _list_sources(p: Any, work: Any, slot: Any, count: Any, pairs: Any, one: Any) -> None:
    """Row addresses of the sending nodes' keys and values, and edge numbers, of a chunk of slots."""
    key_rows, value_rows, edges, bias_rows = (
        work + p.key_rows,
        work + p.value_rows,
        work + p.edges,
        work + p.bias_rows,
    )
    k, k_node, v, v_node, nodes = p.k, p.k_node, p.v, p.v_node, p.row_source + 4 * slot
    for e in range(count):
        node = load_node(nodes + 4 * e)
        store_scalar(key_rows + 8 * e, k + node * k_node)
        store_scalar(value_rows + 8 * e, v + node * v_node)
    if p.needs_edges:
        for e in range(count):
            edge = load_int64(p.row_edge + 8 * (slot + e))
            store_scalar(edges + 8 * e, edge)
            store_scalar(bias_rows + 8 * e, p.bias + edge * p.bias_edge)
        _repeat_last(edges, count, pairs, one)
        _repeat_last(bias_rows, count, pairs, one)
    if p.edge_dim > 0:
        _project(p, key_rows, work + p.key_buffer, edges, count, one)
        if p.score == DOT:
            _project(p, value_rows, work + p.value_buffer, edges, count, one)
    _repeat_last(key_rows, count, pairs, one)
    _repeat_last(value_rows, count, pairs, one)


@part()
def _logits(p: Any, work: Any, own: Any, count: Any, pairs: Any, one: Any) -> None:
    """The chunk's logits, −inf where masked or past the end; what the backward of the score needs beside.

    ``own`` is the receiving node's row of q.
    """
    group, size, vector = edges_per_vector(pairs, one), scalar_bytes(one), vector_bytes(one)
    slope, minus_inf = _constant(p, _SLOPE, one), _constant(p, _MINUS_INF, one)
    hidden, zero, scale = splat(minus_inf), splat(one - one), splat(_constant(p, _SCALE, one))
    score, heads, head_dim, att, has_bias, has_softcap = (
        p.score,
        p.heads,
        p.head_dim,
        p.att,
        p.has_bias,
        p.has_softcap,
    )
    key_rows, bias_rows, logits, inner = (
        work + p.key_rows,
        work + p.bias_rows,
        work + p.logits,
        work + p.inner,
    )
    total = count * padded_heads(pairs)
    pair = 0
    for edge in range(0, count, group):
        bias = zero
        if has_bias:
            bias = gather_heads(bias_rows + 8 * edge, heads, p.bias_head, pairs, one)
        if score == DOT:
            x = mul(lane_dots(own, key_rows + 8 * edge, att, heads, head_dim, slope, pairs, one), scale)
            if has_softcap:
                cap = splat(_constant(p, _SOFTCAP, one))
                x = mul(cap, tanh(div(x, cap)))
                store(inner, x)
            x = add(x, bias)
        elif score == ADDITIVE:
            x = add(
                spread_heads(own, heads, pairs, one),
                gather_heads(key_rows + 8 * edge, heads, size, pairs, one),
            )
            x = add(x, bias)
            store(inner, x)
            x = leaky(x, slope)
        else:
            x = lane_dynamic(own, key_rows + 8 * edge, att, heads, head_dim, slope, pairs, one)
        if has_bias:
            x = keep_where_equal(bias, minus_inf, hidden, x)
        if edge + group > count:
            x = keep_between(x, hidden, pair, 0, total)
        store(logits, x)
        logits += vector
        inner += vector
        pair += lanes(one)


@part()
def _sum_rows(
    acc: Any, table: Any, units: Any, tail: Any, rows: Any, w: Any, count: Any, pairs: Any, one: Any
) -> None:
    """``acc[u] += w[e, head of u] * row e`` for all units u of a row."""
    vector, step = vector_bytes(one), padded_heads(pairs) * scalar_bytes(one)
    u = 0
    if tail:
        while u + 4 <= units:
            accumulate_4_masked(acc + u * vector, 0, table + u * UNIT_BYTES, rows, w, step, count, 0, one)
            u += 4
        while u < units:
            accumulate_1_masked(acc + u * vector, 0, table + u * UNIT_BYTES, rows, w, step, count, 0, one)
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


@part()
def _sum_visible(
    p: Any,
    work: Any,
    acc: Any,
    table: Any,
    blocks: Any,
    rows: Any,
    w: Any,
    count: Any,
    pairs: Any,
    one: Any,
) -> None:
    """``_sum_rows`` head by head over the pairs of nonzero weight only: a masked row may hold NaN."""
    size, vector = scalar_bytes(one), vector_bytes(one)
    for head in range(p.heads):
        n = 0
        for e in range(count):
            weight = load_scalar(w + (e * padded_heads(pairs) + head) * size, one)
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


@part()
def _sum_keys(p: Any, work: Any, acc: Any, rows: Any, w: Any, count: Any, pairs: Any, one: Any) -> None:
    """Weighted sum of rows with key's features (k or q)."""
    if p.is_masked:
        _sum_visible(p, work, acc, p.key_units, p.key_blocks, rows, w, count, pairs, one)
    else:
        units = p.heads * p.key_blocks
        _sum_rows(acc, p.key_units, units, p.key_tail, rows, w, count, pairs, one)


@part()
def _sum_values(p: Any, work: Any, acc: Any, rows: Any, w: Any, count: Any, pairs: Any, one: Any) -> None:
    """Weighted sum of rows with value's features (v or dout)."""
    if p.is_masked:
        _sum_visible(p, work, acc, p.value_units, p.value_blocks, rows, w, count, pairs, one)
    else:
        units = p.heads * p.value_blocks
        _sum_rows(acc, p.value_units, units, p.value_tail, rows, w, count, pairs, one)


@part()
def _sum_slopes(
    p: Any, acc: Any, acc_att: Any, rows: Any, w: Any, count: Any, own: Any, pairs: Any, one: Any
) -> None:
    """``acc += w * slope(own + row)``, and ``acc_att += w * leaky_relu(own + row)`` unless it is 0."""
    vector, step, units = vector_bytes(one), padded_heads(pairs) * scalar_bytes(one), p.heads * p.key_blocks
    slope = _constant(p, _SLOPE, one)
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


@part()
def _write_lanes(place: Any, vector: Any, count: Any, work: Any, one: Any) -> None:
    """Store the first ``count`` lanes."""
    size = scalar_bytes(one)
    store(work, vector)
    for d in range(count):
        store_scalar(place + d * size, load_scalar(work + d * size, one))


@part()
def _write_rows(row: Any, acc: Any, table: Any, units: Any, factors: Any, work: Any, one: Any) -> None:
    """Write units to a row of (heads, features); ``factors`` holds one per unit (0: none)."""
    vector, _size = vector_bytes(one), scalar_bytes(one)
    for u in range(units):
        x = load(acc + u * vector, one)
        if factors != 0:
            head = load_int64(table + u * UNIT_BYTES + 8)  # byte offset of the head's number
            x = mul(x, splat(load_scalar(factors + head, one)))
        offset, count = load_int64(table + u * UNIT_BYTES), load_int64(table + u * UNIT_BYTES + 16)
        if count == lanes(one):
            store(row + offset, x)
        else:
            _write_lanes(row + offset, x, count, work, one)


@part(types.int64)
def _first_edge(ptr: Any, node: Any, row: Any) -> Any:
    """Where a node's edges begin in the item whose row of five is at ``row``."""
    return load_int64(row + 16) if load_int64(row + 32) >= 0 else load_int64(ptr + 8 * node)


@part(types.int64)
def _last_edge(ptr: Any, node: Any, row: Any) -> Any:
    """Where they end."""
    return load_int64(row + 24) if load_int64(row + 32) >= 0 else load_int64(ptr + 8 * node + 8)


# --- forward ------------------------------------------------------------------------------------------------


@part()
def _forward(address: Any, item: Any, part_row: Any, work: Any, pairs: Any, one: Any) -> None:
    p = _read(address)
    size, _width, vector = scalar_bytes(one), lanes(one), vector_bytes(one)
    minus_inf, zero = splat(_constant(p, _MINUS_INF, one)), splat(one - one)
    keep_factor = _constant(p, _KEEP_FACTOR, one)
    bounds = p.row_items + 40 * item  # of nodes, of edges, and the number of the piece
    first, stop, piece = load_int64(bounds), load_int64(bounds + 8), load_int64(bounds + 32)
    units, group = p.heads * p.value_blocks, edges_per_vector(pairs, one)
    logits, weights, value_rows, acc = (
        work + p.logits,
        work + p.weights,
        work + p.value_rows,
        work + p.acc,
    )
    for node in range(first, stop):
        lo, hi = _first_edge(p.row_ptr, node, bounds), _last_edge(p.row_ptr, node, bounds)
        own = p.q + node * p.q_node
        m, l = minus_inf, zero
        _zero(acc, units, one)
        for slot in range(lo, hi, CHUNK):
            count = lesser(CHUNK, hi - slot)
            _list_sources(p, work, slot, count, pairs, one)
            _logits(p, work, own, count, pairs, one)
            vectors = (count + group - 1) // group
            highest = minus_inf
            for n in range(vectors):
                highest = maximum(load(logits + n * vector, one), highest)
            m_new = maximum(fold_max(pairs, highest), m)
            pivot = keep_where_equal(m_new, _constant(p, _MINUS_INF, one), zero, m_new)
            alpha = exp(sub(m, pivot))
            l = mul(l, alpha)
            m = m_new
            has_dropout = p.has_dropout
            for n in range(vectors):
                x = exp(sub(load(logits + n * vector, one), pivot))
                l = add(l, x)
                if has_dropout:
                    edges = work + p.edges + 8 * n * group
                    x = drop_pairs(x, p.hash_0, p.hash_1, edges, p.threshold, keep_factor, pairs)
                store(weights + n * vector, x)
            if slot > lo:
                store(work + p.alpha, alpha)
                for u in range(units):
                    head = load_int64(p.value_units + u * UNIT_BYTES + 8)
                    place = acc + u * vector
                    store(place, mul(load(place, one), splat(load_scalar(work + p.alpha + head, one))))
            _sum_values(p, work, acc, value_rows, weights, count, pairs, one)
        store(work + p.alpha, keep_where_equal(m, _constant(p, _MINUS_INF, one), zero, m))
        store(work + p.alpha_2, fold_sum(pairs, l))
        row, m_row, l_row = p.out + node * p.v_node, p.m + node * p.m_node, p.l + node * p.m_node
        if piece >= 0:
            row, m_row, l_row = (
                p.part_out + part_row * p.v_node,
                p.part_m + part_row * p.m_node,
                p.part_l + part_row * p.m_node,
            )
        for head in range(p.heads):
            total = load_scalar(work + p.alpha_2 + head * size, one)
            store_scalar(m_row + head * size, load_scalar(work + p.alpha + head * size, one))
            store_scalar(l_row + head * size, total)
            if piece >= 0:
                total = one
            elif total != 0:
                total = one / total
            store_scalar(work + p.alpha_2 + head * size, total)
        _write_rows(row, acc, p.value_units, units, work + p.alpha_2, work + p.spare, one)


@jit(length_of="pairs")
def forward_item(address: Any, item: Any, part_row: Any, work: Any, pairs: Any, one: Any) -> None:
    """Out, m and l of an item's nodes; for a part of a hub its unnormalised sums in row ``part_row``."""
    _forward(address, item, part_row, work, pairs, one)


@part()
def _invert_sums(p: Any, place: Any, node: Any, one: Any) -> None:
    """1 / l of the node's heads, 0 where l is 0."""
    size = scalar_bytes(one)
    for head in range(p.heads):
        total = load_scalar(p.l + node * p.m_node + head * size, one)
        if total != 0:
            total = one / total
        store_scalar(place + head * size, total)


@part()
def _weights(address: Any, item: Any, work: Any, pairs: Any, one: Any) -> None:
    p = _read(address)
    size, vector, group = scalar_bytes(one), vector_bytes(one), edges_per_vector(pairs, one)
    bounds = p.row_items + 40 * item  # of nodes, of edges, and the number of the piece
    first, stop = load_int64(bounds), load_int64(bounds + 8)
    for node in range(first, stop):
        lo, hi = _first_edge(p.row_ptr, node, bounds), _last_edge(p.row_ptr, node, bounds)
        _invert_sums(p, work + p.spare, node, one)
        m = spread_heads(p.m + node * p.m_node, p.heads, pairs, one)
        l = spread_heads(work + p.spare, p.heads, pairs, one)
        for slot in range(lo, hi, CHUNK):
            count = lesser(CHUNK, hi - slot)
            _list_sources(p, work, slot, count, pairs, one)
            _logits(p, work, p.q + node * p.q_node, count, pairs, one)
            for n in range((count + group - 1) // group):
                x = exp(sub(load(work + p.logits + n * vector, one), m))
                store(work + p.weights + n * vector, mul(x, l))
            for e in range(count):
                row = p.edge_out + load_int64(work + p.edges + 8 * e) * p.m_node
                for head in range(p.heads):
                    weight = work + p.weights + (e * padded_heads(pairs) + head) * size
                    store_scalar(row + head * size, load_scalar(weight, one))


@jit(length_of="pairs")
def weights_item(address: Any, item: Any, work: Any, pairs: Any, one: Any) -> None:
    """The softmax weights of an item's edges, written in the caller's edge order."""
    _weights(address, item, work, pairs, one)


# --- backward -----------------------------------------------------------------------------------------------


@part()
def _edge_gradients(p: Any, work: Any, node: Any, count: Any, item: Any, pairs: Any, one: Any) -> None:
    """dedge_features of a chunk, and its part of the item's dedge_weight: both from dke (+ dve)."""
    size, width = scalar_bytes(one), lanes(one)
    length = p.heads * p.head_dim
    slope = _constant(p, _SLOPE, one)
    q, dout, gradient = p.q + node * p.q_node, p.dout + node * p.v_node, work + p.edge_gradient
    for e in range(count):
        key = load_int64(work + p.key_rows + 8 * e)
        for head in range(p.heads):
            pair = (e * padded_heads(pairs) + head) * size
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
            weight = p.edge_weight + c * p.edge_row
            dweight = p.dedge_weight + (item * p.edge_dim + c) * p.edge_row
            factor = splat(load_scalar(p.features + (edge * p.edge_dim + c) * size, one))
            total = splat(one - one)
            for d in range(0, length, width):
                row = load(gradient + d * size, one)
                total = fma(row, load(weight + d * size, one), total)
                store(dweight + d * size, fma(factor, row, load(dweight + d * size, one)))
            store_scalar(p.dfeatures + (edge * p.edge_dim + c) * size, hsum(total))


@part()
def _chunk_gradients(
    p: Any, work: Any, node: Any, delta: Any, m: Any, l: Any, count: Any, pairs: Any, one: Any
) -> None:
    """Pd in ``weights``, ds in ``ds`` and dbias in ``spare_pairs`` of a chunk whose logits are there."""
    _size, vector, group = scalar_bytes(one), vector_bytes(one), edges_per_vector(pairs, one)
    slope, minus_inf, zero = _constant(p, _SLOPE, one), _constant(p, _MINUS_INF, one), splat(one - one)
    scale, cap = splat(_constant(p, _SCALE, one)), splat(_constant(p, _SOFTCAP, one))
    keep_factor = _constant(p, _KEEP_FACTOR, one)
    dout, heads, head_dim_v = p.dout + node * p.v_node, p.heads, p.head_dim_v
    score, has_dropout, has_softcap = p.score, p.has_dropout, p.has_softcap
    value_rows, edges = work + p.value_rows, work + p.edges
    logits, inner, weights, ds_place, dbias = (
        work + p.logits,
        work + p.inner,
        work + p.weights,
        work + p.ds,
        work + p.spare_pairs,
    )
    for edge in range(0, count, group):
        dp = lane_dots(dout, value_rows + 8 * edge, 0, heads, head_dim_v, slope, pairs, one)
        logit = load(logits, one)
        x = mul(exp(sub(logit, m)), l)
        pd = x
        if has_dropout:
            words = edges + 8 * edge
            pd = drop_pairs(x, p.hash_0, p.hash_1, words, p.threshold, keep_factor, pairs)
            dp = drop_pairs(dp, p.hash_0, p.hash_1, words, p.threshold, keep_factor, pairs)
        ds = keep_where_equal(logit, minus_inf, zero, mul(x, sub(dp, delta)))
        if score == DOT:
            store(dbias, ds)
            if has_softcap:
                bent = div(load(inner, one), cap)
                ds = mul(ds, sub(splat(one), mul(bent, bent)))
            ds = mul(ds, scale)
        elif score == ADDITIVE:
            ds = slope_where(load(inner, one), ds, slope)
            store(dbias, ds)
        store(ds_place, ds)
        store(weights, keep_where_equal(logit, minus_inf, zero, pd))
        logits += vector
        inner += vector
        weights += vector
        ds_place += vector
        dbias += vector


@part()
def _backward_target(address: Any, item: Any, part_row: Any, work: Any, pairs: Any, one: Any) -> None:
    p = _read(address)
    size, vector, group = scalar_bytes(one), vector_bytes(one), edges_per_vector(pairs, one)
    zero, slope, step = splat(one - one), _constant(p, _SLOPE, one), padded_heads(pairs) * scalar_bytes(one)
    bounds = p.row_items + 40 * item  # of nodes, of edges, and the number of the piece
    first, stop, piece = load_int64(bounds), load_int64(bounds + 8), load_int64(bounds + 32)
    units = p.heads * p.key_blocks
    weights, ds, acc, acc_att, key_rows, value_rows = (
        work + p.weights,
        work + p.ds,
        work + p.acc,
        work + p.acc_2,
        work + p.key_rows,
        work + p.value_rows,
    )
    _zero(acc_att, units, one)  # the item's share of datt
    _zero(work + p.edge_gradient, p.edge_row // vector, one)  # its padding is read
    for node in range(first, stop):
        lo, hi = _first_edge(p.row_ptr, node, bounds), _last_edge(p.row_ptr, node, bounds)
        own, dout = p.q + node * p.q_node, p.dout + node * p.v_node
        store_scalar(value_rows, p.out + node * p.v_node)
        for e in range(1, group):
            store_scalar(value_rows + 8 * e, p.out + node * p.v_node)
        delta = lane_dots(dout, value_rows, 0, p.heads, p.head_dim_v, slope, pairs, one)
        _invert_sums(p, work + p.spare, node, one)
        m = spread_heads(p.m + node * p.m_node, p.heads, pairs, one)
        l = spread_heads(work + p.spare, p.heads, pairs, one)
        _zero(acc, units, one)
        dscore = zero
        for slot in range(lo, hi, CHUNK):
            count = lesser(CHUNK, hi - slot)
            _list_sources(p, work, slot, count, pairs, one)
            _logits(p, work, own, count, pairs, one)
            _chunk_gradients(p, work, node, delta, m, l, count, pairs, one)
            pair_rows = p.edge_pairs + slot * 2 * step
            for e in range(count):
                copy_heads(pair_rows + e * 2 * step, weights + e * step, pairs, one)
                copy_heads(pair_rows + e * 2 * step + step, ds + e * step, pairs, one)
            if p.has_bias:
                for e in range(count):
                    row = p.edge_out + load_int64(work + p.edges + 8 * e) * p.m_node
                    for head in range(p.heads):
                        at = work + p.spare_pairs + e * step + head * size
                        store_scalar(row + head * size, load_scalar(at, one))
            if p.score == DOT:
                _sum_keys(p, work, acc, key_rows, ds, count, pairs, one)
            elif p.score == DYNAMIC:
                _sum_slopes(p, acc, acc_att, key_rows, ds, count, own, pairs, one)
            else:
                for n in range((count + group - 1) // group):
                    dscore = add(dscore, load(ds + n * vector, one))
            if p.edge_dim > 0:
                _edge_gradients(p, work, node, count, item, pairs, one)
        row = p.dq + node * p.q_node
        if piece >= 0:
            row = p.part_out + part_row * p.q_node
        if p.score == ADDITIVE:
            store(acc, fold_sum(pairs, dscore))
            for head in range(p.heads):
                store_scalar(row + head * size, load_scalar(acc + head * size, one))
        else:
            if p.score == DYNAMIC:
                _times_att(p, acc, one)
            _write_rows(row, acc, p.key_units, units, 0, work + p.spare, one)
    if p.score == DYNAMIC:
        row = p.datt + item * p.heads * p.head_dim * size
        _write_rows(row, acc_att, p.key_units, units, 0, work + p.spare, one)


@jit(length_of="pairs")
def backward_target_item(address: Any, item: Any, part_row: Any, work: Any, pairs: Any, one: Any) -> None:
    """Gradient dq of an item's receiving nodes, pd and ds of their edges, and what belongs to edges."""
    _backward_target(address, item, part_row, work, pairs, one)


@part()
def _times_att(p: Any, acc: Any, one: Any) -> None:
    """Acc *= att."""
    size = scalar_bytes(one)
    for u in range(p.heads * p.key_blocks):
        unit = p.key_units + u * UNIT_BYTES
        att, place = p.att + load_int64(unit), acc + u * vector_bytes(one)
        for d in range(load_int64(unit + 16)):
            at = place + d * size
            store_scalar(at, load_scalar(at, one) * load_scalar(att + d * size, one))


@part()
def _backward_source(address: Any, item: Any, part_row: Any, work: Any, pairs: Any, one: Any) -> None:
    p = _read(address)
    size, vector, group = scalar_bytes(one), vector_bytes(one), edges_per_vector(pairs, one)
    zero, step = splat(one - one), padded_heads(pairs) * scalar_bytes(one)
    bounds = p.col_items + 40 * item  # of nodes, of edges, and the number of the piece
    first, stop, piece = load_int64(bounds), load_int64(bounds + 8), load_int64(bounds + 32)
    key_units, value_units = p.heads * p.key_blocks, p.heads * p.value_blocks
    weights, ds, acc, acc_v, key_rows, value_rows = (
        work + p.weights,
        work + p.ds,
        work + p.acc,
        work + p.acc_2,
        work + p.key_rows,
        work + p.value_rows,
    )
    for node in range(first, stop):
        lo, hi = _first_edge(p.col_ptr, node, bounds), _last_edge(p.col_ptr, node, bounds)
        _zero(acc, key_units, one)
        _zero(acc_v, value_units, one)
        dscore = zero
        for place in range(lo, hi, CHUNK):
            count = lesser(CHUNK, hi - place)
            q, q_node, dout, v_node, edge_pairs = p.q, p.q_node, p.dout, p.v_node, p.edge_pairs
            targets, slots = p.col_target + 4 * place, p.col_slot + 8 * place
            for e in range(count):
                target = load_node(targets + 4 * e)
                store_scalar(key_rows + 8 * e, q + target * q_node)
                store_scalar(value_rows + 8 * e, dout + target * v_node)
                row = edge_pairs + load_int64(slots + 8 * e) * 2 * step
                copy_heads(weights + e * step, row, pairs, one)
                copy_heads(ds + e * step, row + step, pairs, one)
            _sum_values(p, work, acc_v, value_rows, weights, count, pairs, one)
            if p.score == DOT:
                _sum_keys(p, work, acc, key_rows, ds, count, pairs, one)
            elif p.score == DYNAMIC:
                if p.edge_dim > 0:
                    for e in range(count):
                        edge = load_int64(p.row_edge + 8 * load_int64(slots + 8 * e))
                        store_scalar(work + p.edges + 8 * e, edge)
                    _project(p, key_rows, work + p.key_buffer, work + p.edges, count, one)
                own = p.k + node * p.k_node
                _sum_slopes(p, acc, 0, key_rows, ds, count, own, pairs, one)
            else:
                total = count * padded_heads(pairs)
                for n in range((count + group - 1) // group):
                    x = load(ds + n * vector, one)
                    dscore = add(dscore, keep_between(x, zero, n * lanes(one), 0, total))
        dk_row, dv_row = p.dk + node * p.k_node, p.dv + node * p.v_node
        if piece >= 0:
            dk_row, dv_row = p.part_out + part_row * p.k_node, p.part_dv + part_row * p.v_node
        if p.score == ADDITIVE:
            store(acc, fold_sum(pairs, dscore))
            for head in range(p.heads):
                store_scalar(dk_row + head * size, load_scalar(acc + head * size, one))
        else:
            if p.score == DYNAMIC:
                _times_att(p, acc, one)
            _write_rows(dk_row, acc, p.key_units, key_units, 0, work + p.spare, one)
        _write_rows(dv_row, acc_v, p.value_units, value_units, 0, work + p.spare, one)


@jit(length_of="pairs")
def backward_source_item(address: Any, item: Any, part_row: Any, work: Any, pairs: Any, one: Any) -> None:
    """Gradients dk and dv of an item's sending nodes, from the pd and ds of their edges."""
    _backward_source(address, item, part_row, work, pairs, one)
