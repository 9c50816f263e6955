"""A chunk of edges of one node: its rows, logits, weighted sums, and writing what came of them.

Order of loops, the same in all walks: the nodes of an item (one thread owns them, alone writes their rows),
a node's edges by chunks of CHUNK, inside a chunk first all logits as vectors of (edge, head) pairs, then the
softmax on those vectors, then the weighted sum of gathered rows with the sums in registers. An item that is
one part of a hub does the same over its share of the edges and writes to a row of its own, merged afterwards.

Arrays are addresses, q, k, v and dout of (nodes, heads, head_dim) elements in C order. ``p`` is the record of
a call (`_call.CALL`), ``work`` this thread's scratch, ``one`` a scalar whose type is the accumulation dtype.
"""

from typing import Any

import numba
from numba import types

from npattn.kernels._parts import part
from npattn.kernels._simd.exp import tanh
from npattn.kernels._simd.vectors import (
    add,
    div,
    fma,
    keep_between,
    keep_where_equal,
    lanes,
    load,
    load_scalar,
    mul,
    record_reader,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    vector_bytes,
)
from npattn.kernels.edge.numba_cpu._call import ADDITIVE, CALL, DOT
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
    edges_per_vector,
    gather_heads,
    lane_dots,
    lane_dynamic,
    leaky,
    load_int64,
    load_node,
    padded_heads,
    spread_heads,
)

call_at = record_reader(numba.from_dtype(CALL))
SCALE, SOFTCAP, SLOPE, KEEP_FACTOR, MINUS_INF = range(5)


@part("one")
def constant(p: Any, index: Any, one: Any) -> Any:
    return load_scalar(p.constants + index * scalar_bytes(one), one)


@part()
def clear(place: Any, vectors: Any, one: Any) -> None:
    for n in range(vectors):
        store(place + n * vector_bytes(one), splat(one - one))


# --- a chunk of edges ---------------------------------------------------------------------------------------


@part()
def project(p: Any, rows: Any, buffer: Any, edges: Any, count: Any, one: Any) -> None:
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
def list_sources(p: Any, work: Any, slot: Any, count: Any, pairs: Any, one: Any) -> None:
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
        project(p, key_rows, work + p.key_buffer, edges, count, one)
        if p.score == DOT:
            project(p, value_rows, work + p.value_buffer, edges, count, one)
    _repeat_last(key_rows, count, pairs, one)
    _repeat_last(value_rows, count, pairs, one)


@part()
def write_logits(p: Any, work: Any, own: Any, count: Any, pairs: Any, one: Any) -> None:
    """The chunk's logits, −inf where masked or past the end; what the backward of the score needs beside.

    ``own`` is the receiving node's row of q.
    """
    group, size, vector = edges_per_vector(pairs, one), scalar_bytes(one), vector_bytes(one)
    slope, minus_inf = constant(p, SLOPE, one), constant(p, MINUS_INF, one)
    hidden, zero, scale = splat(minus_inf), splat(one - one), splat(constant(p, SCALE, one))
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
                cap = splat(constant(p, SOFTCAP, one))
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
def sum_keys(p: Any, work: Any, acc: Any, rows: Any, w: Any, count: Any, pairs: Any, one: Any) -> None:
    """Weighted sum of rows with key's features (k or q)."""
    if p.is_masked:
        _sum_visible(p, work, acc, p.key_units, p.key_blocks, rows, w, count, pairs, one)
    else:
        units = p.heads * p.key_blocks
        _sum_rows(acc, p.key_units, units, p.key_tail, rows, w, count, pairs, one)


@part()
def sum_values(p: Any, work: Any, acc: Any, rows: Any, w: Any, count: Any, pairs: Any, one: Any) -> None:
    """Weighted sum of rows with value's features (v or dout)."""
    if p.is_masked:
        _sum_visible(p, work, acc, p.value_units, p.value_blocks, rows, w, count, pairs, one)
    else:
        units = p.heads * p.value_blocks
        _sum_rows(acc, p.value_units, units, p.value_tail, rows, w, count, pairs, one)


@part()
def sum_slopes(
    p: Any, acc: Any, acc_att: Any, rows: Any, w: Any, count: Any, own: Any, pairs: Any, one: Any
) -> None:
    """``acc += w * slope(own + row)``, and ``acc_att += w * leaky_relu(own + row)`` unless it is 0."""
    vector, step, units = vector_bytes(one), padded_heads(pairs) * scalar_bytes(one), p.heads * p.key_blocks
    slope = constant(p, SLOPE, one)
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
def write_rows(row: Any, acc: Any, table: Any, units: Any, factors: Any, work: Any, one: Any) -> None:
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
def first_edge(ptr: Any, node: Any, row: Any) -> Any:
    """Where a node's edges begin in the item whose row of five is at ``row``."""
    return load_int64(row + 16) if load_int64(row + 32) >= 0 else load_int64(ptr + 8 * node)


@part(types.int64)
def last_edge(ptr: Any, node: Any, row: Any) -> Any:
    """Where they end."""
    return load_int64(row + 24) if load_int64(row + 32) >= 0 else load_int64(ptr + 8 * node + 8)


@part()
def invert_sums(p: Any, place: Any, node: Any, one: Any) -> None:
    """1 / l of the node's heads, 0 where l is 0."""
    size = scalar_bytes(one)
    for head in range(p.heads):
        total = load_scalar(p.l + node * p.m_node + head * size, one)
        if total != 0:
            total = one / total
        store_scalar(place + head * size, total)
