"""The forward walk, and the one that writes the weights: `_chunk` says what happens to a chunk of edges."""

from typing import Any

from npattn.kernels._jit import jit
from npattn.kernels._parts import part
from npattn.kernels._simd.exp import exp
from npattn.kernels._simd.vectors import (
    add,
    keep_where_equal,
    lanes,
    lesser,
    load,
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
from npattn.kernels.edge.numba_cpu._call import CHUNK
from npattn.kernels.edge.numba_cpu._chunk import (
    KEEP_FACTOR,
    MINUS_INF,
    call_at,
    clear,
    constant,
    first_edge,
    invert_sums,
    last_edge,
    list_sources,
    sum_values,
    write_logits,
    write_rows,
)
from npattn.kernels.edge.numba_cpu._lanes import (
    UNIT_BYTES,
    drop_pairs,
    edges_per_vector,
    fold_max,
    fold_sum,
    load_int64,
    padded_heads,
    spread_heads,
)


@part()
def _forward(address: Any, item: Any, part_row: Any, work: Any, pairs: Any, one: Any) -> None:
    p = call_at(address)
    size, _width, vector = scalar_bytes(one), lanes(one), vector_bytes(one)
    minus_inf, zero = splat(constant(p, MINUS_INF, one)), splat(one - one)
    keep_factor = constant(p, KEEP_FACTOR, one)
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
        lo, hi = first_edge(p.row_ptr, node, bounds), last_edge(p.row_ptr, node, bounds)
        own = p.q + node * p.q_node
        m, l = minus_inf, zero
        clear(acc, units, one)
        for slot in range(lo, hi, CHUNK):
            count = lesser(CHUNK, hi - slot)
            list_sources(p, work, slot, count, pairs, one)
            write_logits(p, work, own, count, pairs, one)
            vectors = (count + group - 1) // group
            highest = minus_inf
            for n in range(vectors):
                highest = maximum(load(logits + n * vector, one), highest)
            m_new = maximum(fold_max(pairs, highest), m)
            pivot = keep_where_equal(m_new, constant(p, MINUS_INF, one), zero, m_new)
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
            sum_values(p, work, acc, value_rows, weights, count, pairs, one)
        store(work + p.alpha, keep_where_equal(m, constant(p, MINUS_INF, one), zero, m))
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
        write_rows(row, acc, p.value_units, units, work + p.alpha_2, work + p.spare, one)


@jit(length_of="pairs")
def forward_item(address: Any, item: Any, part_row: Any, work: Any, pairs: Any, one: Any) -> None:
    """Out, m and l of an item's nodes; for a part of a hub its unnormalised sums in row ``part_row``."""
    _forward(address, item, part_row, work, pairs, one)


@part()
def _weights(address: Any, item: Any, work: Any, pairs: Any, one: Any) -> None:
    p = call_at(address)
    size, vector, group = scalar_bytes(one), vector_bytes(one), edges_per_vector(pairs, one)
    bounds = p.row_items + 40 * item  # of nodes, of edges, and the number of the piece
    first, stop = load_int64(bounds), load_int64(bounds + 8)
    for node in range(first, stop):
        lo, hi = first_edge(p.row_ptr, node, bounds), last_edge(p.row_ptr, node, bounds)
        invert_sums(p, work + p.spare, node, one)
        m = spread_heads(p.m + node * p.m_node, p.heads, pairs, one)
        l = spread_heads(work + p.spare, p.heads, pairs, one)
        for slot in range(lo, hi, CHUNK):
            count = lesser(CHUNK, hi - slot)
            list_sources(p, work, slot, count, pairs, one)
            write_logits(p, work, p.q + node * p.q_node, count, pairs, one)
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


__all__ = ["forward_item", "weights_item"]
