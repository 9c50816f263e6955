// forward.cu: graph attention forward, one warp an item, online softmax over the in-edges of a node.
//
// Four edges at a time, so that their rows are on their way together. A hub's parts go to part_*, and edge_merge joins
// them in order.

constexpr int BATCH = 4;

extern "C" __global__ void __launch_bounds__(THREADS, 1) edge_forward(const __grid_constant__ Params p) {
    const Place at = my_place(p);
    if (at.warp >= p.num_items) return;
    const int node = p.node[at.warp], part = p.part[at.warp];
    const i64 end = p.end[at.warp];
    Acc q[PER_LANE], att[PER_LANE], acc[PER_LANE_V], m = minus_infinity(), l = 0;
    read_node(q, p.q, p.q_stride, node, at.head, first_of(at), p.head_dim, p.aligned);
    if (SCORE == DYNAMIC) read_row(att, (const Acc*)p.att + (i64)at.head * p.head_dim, at.first, p.head_dim, false);
#pragma unroll
    for (int c = 0; c < PER_LANE_V; ++c) acc[c] = 0;

    for (i64 slot = p.begin[at.warp]; slot < end; slot += BATCH) {
        Acc x[BATCH], v[BATCH][PER_LANE_V];
        i64 edge[BATCH];
        Acc largest = m;
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const i64 s = slot + n < end ? slot + n : end - 1;
            const int u = p.row_source[s];
            edge[n] = p.row_edge[s];
            Acc k[PER_LANE], inner;
            read_node(k, p.k, p.k_stride, u, at.head, first_of(at), p.head_dim, p.aligned);
            read_node(v[n], p.v, p.v_stride, u, at.head, at.first_v, p.head_dim_v, p.aligned);
            add_features(p, k, edge[n], at.head, first_of(at));
            if (SCORE == DOT) add_features(p, v[n], edge[n], at.head, at.first_v);
            x[n] = logit_of(p, q, k, att, edge[n], at.head, inner);
            if (slot + n >= end) x[n] = minus_infinity();
            largest = larger(largest, x[n]);
        }
        const Acc pivot = largest == minus_infinity() ? Acc(0) : largest, shrink = exp_of(m - pivot);
        m = largest, l *= shrink;
#pragma unroll
        for (int c = 0; c < PER_LANE_V; ++c) acc[c] *= shrink;
#pragma unroll
        for (int n = 0; n < BATCH; ++n) {
            const Acc w = weight_for<T>(x[n] - pivot);
            l += w;
            if (x[n] == minus_infinity() || !keeps(p, edge[n], at.head)) continue;  // 0 * NaN is NaN
#pragma unroll
            for (int c = 0; c < PER_LANE_V; ++c) acc[c] += w * v[n][c];
        }
    }

    if (!at.is_real) return;
    const bool whole = part < 0;
    const i64 row = (i64)(whole ? node : part) * p.heads + at.head;
    if (at.first_v == 0) {
        ((Acc*)(whole ? p.m : p.part_m))[row] = !whole || l != Acc(0) ? m : Acc(0);
        ((Acc*)(whole ? p.l : p.part_l))[row] = whole ? l / unit() : l;
    }
    const Acc norm = !whole ? Acc(1) : l > Acc(0) ? (Acc)p.keep_scale / l : l;
#pragma unroll
    for (int c = 0; c < PER_LANE_V; ++c) {
        if (at.first_v + c >= p.head_dim_v) continue;
        if (whole) store((T*)p.out + row * p.head_dim_v + at.first_v + c, acc[c] * norm);
        else ((Acc*)p.part_out)[row * p.head_dim_v + at.first_v + c] = acc[c];
    }
}

// out, m, l of the hubs from their parts, in order: one warp a hub.
extern "C" __global__ void __launch_bounds__(THREADS, 1) edge_merge(const __grid_constant__ Params p) {
    const Place at = my_place(p);
    if (at.warp >= p.num_hubs || !at.is_real) return;
    const int first = p.hub_part[at.warp], stop = p.hub_part[at.warp + 1];
    Acc m = minus_infinity(), l = 0;
    for (int s = first; s < stop; ++s) m = larger(m, ((const Acc*)p.part_m)[(i64)s * p.heads + at.head]);
    const Acc pivot = m == minus_infinity() ? Acc(0) : m;
    Acc acc[PER_LANE_V];
#pragma unroll
    for (int c = 0; c < PER_LANE_V; ++c) acc[c] = 0;
    for (int s = first; s < stop; ++s) {
        const i64 row = (i64)s * p.heads + at.head;
        const Acc w = exp_of(((const Acc*)p.part_m)[row] - pivot);
        l += ((const Acc*)p.part_l)[row] * w;
#pragma unroll
        for (int c = 0; c < PER_LANE_V; ++c)
            if (at.first_v + c < p.head_dim_v && w > Acc(0)) acc[c] += w * ((const Acc*)p.part_out)[row * p.head_dim_v + at.first_v + c];
    }
    const i64 row = (i64)p.hub_node[at.warp] * p.heads + at.head;
    if (at.first_v == 0) ((Acc*)p.m)[row] = l != Acc(0) ? m : Acc(0), ((Acc*)p.l)[row] = l / unit();
    const Acc norm = l > Acc(0) ? (Acc)p.keep_scale / l : l;
#pragma unroll
    for (int c = 0; c < PER_LANE_V; ++c)
        if (at.first_v + c < p.head_dim_v) store((T*)p.out + row * p.head_dim_v + at.first_v + c, acc[c] * norm);
}

// p before dropout, in the caller's edge order.
extern "C" __global__ void __launch_bounds__(THREADS, 1) edge_weights(const __grid_constant__ Params p) {
    const Place at = my_place(p);
    if (at.warp >= p.num_items) return;
    const int node = p.node[at.warp];
    Acc q[PER_LANE], att[PER_LANE];
    read_node(q, p.q, p.q_stride, node, at.head, first_of(at), p.head_dim, p.aligned);
    if (SCORE == DYNAMIC) read_row(att, (const Acc*)p.att + (i64)at.head * p.head_dim, at.first, p.head_dim, false);
    const Acc m = ((const Acc*)p.m)[(i64)node * p.heads + at.head], l = ((const Acc*)p.l)[(i64)node * p.heads + at.head];
    for (i64 slot = p.begin[at.warp]; slot < p.end[at.warp]; ++slot) {
        const i64 e = p.row_edge[slot];
        Acc k[PER_LANE], inner;
        read_node(k, p.k, p.k_stride, p.row_source[slot], at.head, first_of(at), p.head_dim, p.aligned);
        add_features(p, k, e, at.head, first_of(at));
        const Acc x = logit_of(p, q, k, att, e, at.head, inner);
        if (at.is_real && at.first_v == 0) ((Acc*)p.p)[e * p.heads + at.head] = x == minus_infinity() ? Acc(0) : exp_of(x - m) / l;
    }
}
