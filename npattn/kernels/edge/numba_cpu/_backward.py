"""The backward walks, by receiving and by sending node: see `_chunk` for what happens to a chunk of edges."""

from typing import Any

from npattn.kernels._jit import jit
from npattn.kernels._parts import part
from npattn.kernels._simd.exp import exp
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
    mul,
    scalar_bytes,
    splat,
    store,
    store_scalar,
    sub,
    vector_bytes,
)
from npattn.kernels.edge.numba_cpu._call import ADDITIVE, CHUNK, DOT, DYNAMIC
from npattn.kernels.edge.numba_cpu._chunk import (
    KEEP_FACTOR,
    MINUS_INF,
    SCALE,
    SLOPE,
    SOFTCAP,
    call_at,
    clear,
    constant,
    first_edge,
    invert_sums,
    last_edge,
    list_sources,
    project,
    sum_keys,
    sum_slopes,
    sum_values,
    write_logits,
    write_rows,
)
from npattn.kernels.edge.numba_cpu._lanes import (
    UNIT_BYTES,
    copy_heads,
    drop_pairs,
    edges_per_vector,
    fold_sum,
    lane_dots,
    load_int64,
    load_node,
    padded_heads,
    slope_where,
    spread_heads,
)


@part()
def _edge_gradients(p: Any, work: Any, node: Any, count: Any, item: Any, pairs: Any, one: Any) -> None:
    """dedge_features of a chunk, and its part of the item's dedge_weight: both from dke (+ dve)."""
    size, width = scalar_bytes(one), lanes(one)
    length = p.heads * p.head_dim
    slope = constant(p, SLOPE, one)
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
    slope, minus_inf, zero = constant(p, SLOPE, one), constant(p, MINUS_INF, one), splat(one - one)
    scale, cap = splat(constant(p, SCALE, one)), splat(constant(p, SOFTCAP, one))
    keep_factor = constant(p, KEEP_FACTOR, one)
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
    p = call_at(address)
    size, vector, group = scalar_bytes(one), vector_bytes(one), edges_per_vector(pairs, one)
    zero, slope, step = splat(one - one), constant(p, SLOPE, one), padded_heads(pairs) * scalar_bytes(one)
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
    clear(acc_att, units, one)  # the item's share of datt
    clear(work + p.edge_gradient, p.edge_row // vector, one)  # its padding is read
    for node in range(first, stop):
        lo, hi = first_edge(p.row_ptr, node, bounds), last_edge(p.row_ptr, node, bounds)
        own, dout = p.q + node * p.q_node, p.dout + node * p.v_node
        store_scalar(value_rows, p.out + node * p.v_node)
        for e in range(1, group):
            store_scalar(value_rows + 8 * e, p.out + node * p.v_node)
        delta = lane_dots(dout, value_rows, 0, p.heads, p.head_dim_v, slope, pairs, one)
        invert_sums(p, work + p.spare, node, one)
        m = spread_heads(p.m + node * p.m_node, p.heads, pairs, one)
        l = spread_heads(work + p.spare, p.heads, pairs, one)
        clear(acc, units, one)
        dscore = zero
        for slot in range(lo, hi, CHUNK):
            count = lesser(CHUNK, hi - slot)
            list_sources(p, work, slot, count, pairs, one)
            write_logits(p, work, own, count, pairs, one)
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
                sum_keys(p, work, acc, key_rows, ds, count, pairs, one)
            elif p.score == DYNAMIC:
                sum_slopes(p, acc, acc_att, key_rows, ds, count, own, pairs, one)
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
            write_rows(row, acc, p.key_units, units, 0, work + p.spare, one)
    if p.score == DYNAMIC:
        row = p.datt + item * p.heads * p.head_dim * size
        write_rows(row, acc_att, p.key_units, units, 0, work + p.spare, one)


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
    p = call_at(address)
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
        lo, hi = first_edge(p.col_ptr, node, bounds), last_edge(p.col_ptr, node, bounds)
        clear(acc, key_units, one)
        clear(acc_v, value_units, one)
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
            sum_values(p, work, acc_v, value_rows, weights, count, pairs, one)
            if p.score == DOT:
                sum_keys(p, work, acc, key_rows, ds, count, pairs, one)
            elif p.score == DYNAMIC:
                if p.edge_dim > 0:
                    for e in range(count):
                        edge = load_int64(p.row_edge + 8 * load_int64(slots + 8 * e))
                        store_scalar(work + p.edges + 8 * e, edge)
                    project(p, key_rows, work + p.key_buffer, work + p.edges, count, one)
                own = p.k + node * p.k_node
                sum_slopes(p, acc, 0, key_rows, ds, count, own, pairs, one)
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
            write_rows(dk_row, acc, p.key_units, key_units, 0, work + p.spare, one)
        write_rows(dv_row, acc_v, p.value_units, value_units, 0, work + p.spare, one)


@jit(length_of="pairs")
def backward_source_item(address: Any, item: Any, part_row: Any, work: Any, pairs: Any, one: Any) -> None:
    """Gradients dk and dv of an item's sending nodes, from the pd and ds of their edges."""
    _backward_source(address, item, part_row, work, pairs, one)


__all__ = ["backward_source_item", "backward_target_item"]
