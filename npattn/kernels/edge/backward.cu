// backward.cu: graph attention backward: a walk by receiving node (dq and what belongs to edges), then one by sending
// node (dk, dv). Both compute the weights again from m and l, so nothing but O(edges * heads) is ever stored, and every
// sum is made by one warp in a fixed order.

// delta[v] = dout[v] . out[v] where out is not 0: one warp a node.
extern "C" __global__ void __launch_bounds__(THREADS, 1) edge_delta(const __grid_constant__ Params p) {
    const Place at = my_place(p);
    if (at.warp >= p.num_targets) return;
    Acc out[PER_LANE_V], dout[PER_LANE_V], sum = 0;
    read_node(out, p.out, p.out_stride, at.warp, at.head, at.first_v, p.head_dim_v, false);
    read_node(dout, p.dout, p.dout_stride, at.warp, at.head, at.first_v, p.head_dim_v, false);
#pragma unroll
    for (int c = 0; c < PER_LANE_V; ++c) if (out[c] != Acc(0)) sum += out[c] * dout[c];
    sum = head_sum(sum);
    if (at.is_real && at.first_v == 0) ((Acc*)p.delta)[(i64)at.warp * p.heads + at.head] = sum;
}

struct Edge { Acc ds, slope, weight; bool is_masked; };  // of the logit after bias; slope of softcap; weight of v
__device__ __forceinline__ Edge backward_edge(const Params& p, Acc x, Acc inner, const Acc (&dout)[PER_LANE_V],
                                              const Acc (&v)[PER_LANE_V], Acc m, Acc l, Acc delta, i64 e, int head) {
    Acc dp = 0;
#pragma unroll
    for (int c = 0; c < PER_LANE_V; ++c) dp += dout[c] * v[c];
    dp = head_sum(dp);
    const bool is_kept = keeps(p, e, head), is_masked = x == minus_infinity() || l == Acc(0);
    dp = is_kept ? dp * (Acc)p.keep_scale : Acc(0);
    const Acc w = exp_of(x - m) / l;
    const Acc slope = HAS_SOFTCAP ? 1 - inner / (Acc)p.softcap * (inner / (Acc)p.softcap) : Acc(1);
    Edge edge = {w * (dp - delta), slope, is_kept ? w * (Acc)p.keep_scale : Acc(0), is_masked};
    if (SCORE == ADDITIVE) edge.ds *= slope_of(p, inner);
    if (is_masked) edge.ds = 0, edge.weight = 0;
    return edge;
}

// dq, dbias, and one part a warp of datt, dfeatures and dweight. num_warps warps share the items.
extern "C" __global__ void __launch_bounds__(THREADS, 1) edge_backward_rows(const __grid_constant__ Params p) {
    const Place at = my_place(p);
    if (at.warp >= p.num_warps) return;
    Acc att[PER_LANE], datt[PER_LANE];
    if (SCORE == DYNAMIC) read_row(att, (const Acc*)p.att + (i64)at.head * p.head_dim, at.first, p.head_dim, false);
#pragma unroll
    for (int c = 0; c < PER_LANE; ++c) datt[c] = 0;

    for (int item = at.warp; item < p.num_items; item += p.num_warps) {
        const int node = p.node[item], part = p.part[item];
        const i64 row = (i64)node * p.heads + at.head;
        const Acc m = ((const Acc*)p.m)[row], l = ((const Acc*)p.l)[row], delta = ((const Acc*)p.delta)[row];
        Acc q[PER_LANE], dout[PER_LANE_V], dq[PER_LANE];
        read_node(q, p.q, p.q_stride, node, at.head, first_of(at), p.head_dim, p.aligned);
        read_node(dout, p.dout, p.dout_stride, node, at.head, at.first_v, p.head_dim_v, p.aligned);
#pragma unroll
        for (int c = 0; c < PER_LANE; ++c) dq[c] = 0;
        for (i64 slot = p.begin[item]; slot < p.end[item]; ++slot) {
            const i64 e = p.row_edge[slot];
            const int u = p.row_source[slot];
            Acc k[PER_LANE], v[PER_LANE_V], inner;
            read_node(k, p.k, p.k_stride, u, at.head, first_of(at), p.head_dim, p.aligned);
            read_node(v, p.v, p.v_stride, u, at.head, at.first_v, p.head_dim_v, p.aligned);
            add_features(p, k, e, at.head, first_of(at));
            if (SCORE == DOT) add_features(p, v, e, at.head, at.first_v);
            const Acc x = logit_of(p, q, k, att, e, at.head, inner);
            const Edge edge = backward_edge(p, x, inner, dout, v, m, l, delta, e, at.head);
            if (HAS_BIAS && at.is_real && at.first_v == 0) ((Acc*)p.dbias)[e * p.heads + at.head] = edge.ds;
            Acc dkey[PER_LANE];  // d of ke[e], and for "dot" of ve[e] too
#pragma unroll
            for (int c = 0; c < PER_LANE; ++c) {
                dkey[c] = 0;
                if (edge.is_masked) continue;
                const Acc ds = edge.ds * edge.slope * scale_before(p);
                if (SCORE == DOT) dq[c] += ds * k[c], dkey[c] = ds * q[c] * scale_after(p) + edge.weight * (HAS_FEATURES ? dout[c < PER_LANE_V ? c : 0] : Acc(0));
                if (SCORE == ADDITIVE && c == 0) dq[c] += edge.ds;
                if (SCORE == DYNAMIC) {
                    const Acc sum = q[c] + k[c];
                    datt[c] += edge.ds * leaky(p, sum);
                    dkey[c] = edge.ds * att[c] * slope_of(p, sum);
                    dq[c] += dkey[c];
                }
            }
            if (HAS_FEATURES) {
                const Acc* feature = (const Acc*)p.features + e * p.edge_dim;
                for (int f = 0; f < p.edge_dim; ++f) {
                    const i64 at_weight = ((i64)f * p.heads + at.head) * p.head_dim;
                    Acc* dweight = (Acc*)p.dweight + (i64)at.warp * p.edge_dim * p.heads * p.head_dim + at_weight;
                    Acc sum = 0;
#pragma unroll
                    for (int c = 0; c < PER_LANE; ++c) {
                        if (at.first + c >= p.head_dim || !at.is_real || edge.is_masked) continue;
                        sum += dkey[c] * ((const Acc*)p.weight)[at_weight + at.first + c];
                        dweight[at.first + c] += dkey[c] * feature[f];
                    }
                    sum = warp_sum(sum);
                    const i64 group = at.head / HEADS_A_WARP;  // lane 0 always has a head
                    if ((threadIdx.x & 31) == 0) ((Acc*)p.dfeatures)[(group * p.num_edges + e) * p.edge_dim + f] = sum;
                }
            }
        }
        if (!at.is_real || (SCORE == ADDITIVE && at.first != 0)) continue;
        const Acc after = SCORE == DOT ? scale_after(p) : Acc(1);
#pragma unroll
        for (int c = 0; c < PER_LANE; ++c) {
            if (at.first + c >= p.head_dim) continue;
            if (part < 0) store((T*)p.dq + row * p.head_dim + at.first + c, dq[c] * after);
            else ((Acc*)p.part_out)[((i64)part * p.heads + at.head) * p.head_dim + at.first + c] = dq[c] * after;
        }
    }
#pragma unroll
    for (int c = 0; c < PER_LANE; ++c)
        if (SCORE == DYNAMIC && at.is_real && at.first + c < p.head_dim) ((Acc*)p.datt)[((i64)at.warp * p.heads + at.head) * p.head_dim + at.first + c] = datt[c];
}

// dk and dv: one warp an item of the lists by sending node.
extern "C" __global__ void __launch_bounds__(THREADS, 1) edge_backward_cols(const __grid_constant__ Params p) {
    const Place at = my_place(p);
    if (at.warp >= p.num_items) return;
    const int node = p.node[at.warp], part = p.part[at.warp];
    Acc own_k[PER_LANE], own_v[PER_LANE_V], att[PER_LANE], dk[PER_LANE], dv[PER_LANE_V];
    read_node(own_k, p.k, p.k_stride, node, at.head, first_of(at), p.head_dim, p.aligned);
    read_node(own_v, p.v, p.v_stride, node, at.head, at.first_v, p.head_dim_v, p.aligned);
    if (SCORE == DYNAMIC) read_row(att, (const Acc*)p.att + (i64)at.head * p.head_dim, at.first, p.head_dim, false);
#pragma unroll
    for (int c = 0; c < PER_LANE; ++c) dk[c] = 0;
#pragma unroll
    for (int c = 0; c < PER_LANE_V; ++c) dv[c] = 0;
    for (i64 place = p.begin[at.warp]; place < p.end[at.warp]; ++place) {
        const i64 e = p.row_edge[p.col_slot[place]];
        const int t = p.col_target[place];
        const i64 row = (i64)t * p.heads + at.head;
        Acc q[PER_LANE], dout[PER_LANE_V], k[PER_LANE], v[PER_LANE_V], inner;
        read_node(q, p.q, p.q_stride, t, at.head, first_of(at), p.head_dim, p.aligned);
        read_node(dout, p.dout, p.dout_stride, t, at.head, at.first_v, p.head_dim_v, p.aligned);
#pragma unroll
        for (int c = 0; c < PER_LANE; ++c) k[c] = own_k[c];
#pragma unroll
        for (int c = 0; c < PER_LANE_V; ++c) v[c] = own_v[c];
        add_features(p, k, e, at.head, first_of(at));
        if (SCORE == DOT) add_features(p, v, e, at.head, at.first_v);
        const Acc x = logit_of(p, q, k, att, e, at.head, inner);
        const Edge edge = backward_edge(p, x, inner, dout, v, ((const Acc*)p.m)[row], ((const Acc*)p.l)[row],
                                        ((const Acc*)p.delta)[row], e, at.head);
        if (edge.is_masked) continue;
#pragma unroll
        for (int c = 0; c < PER_LANE; ++c) {
            if (SCORE == DOT) dk[c] += edge.ds * edge.slope * scale_before(p) * q[c];
            if (SCORE == ADDITIVE && c == 0) dk[c] += edge.ds;
            if (SCORE == DYNAMIC) dk[c] += edge.ds * att[c] * slope_of(p, q[c] + k[c]);
        }
#pragma unroll
        for (int c = 0; c < PER_LANE_V; ++c) if (edge.weight != Acc(0)) dv[c] += edge.weight * dout[c];
    }
    if (!at.is_real) return;
    const i64 row = (i64)(part < 0 ? node : part) * p.heads + at.head;
    const Acc after = SCORE == DOT ? scale_after(p) : Acc(1);
#pragma unroll
    for (int c = 0; c < PER_LANE; ++c) {
        if (at.first + c >= p.head_dim) continue;
        if (part < 0) store((T*)p.dk + row * p.head_dim + at.first + c, dk[c] * after);
        else ((Acc*)p.part_out)[row * p.head_dim + at.first + c] = dk[c] * after;
    }
#pragma unroll
    for (int c = 0; c < PER_LANE_V; ++c) {
        if (at.first_v + c >= p.head_dim_v) continue;
        if (part < 0) store((T*)p.dv + row * p.head_dim_v + at.first_v + c, dv[c]);
        else ((Acc*)p.part_v)[row * p.head_dim_v + at.first_v + c] = dv[c];
    }
}

// Sums the parts of hubs in order: dq from part_out after the walk by receiving node (dk is null then), or dk from
// part_out and dv from part_v after the walk by sending node. One warp a hub.
__device__ __forceinline__ void sum_parts(const Params& p, const void* parts, void* to, int hub, int head, int dim) {
    for (int d = threadIdx.x % LANES; d < dim; d += LANES) {
        Acc sum = 0;
        for (int s = p.hub_part[hub]; s < p.hub_part[hub + 1]; ++s) sum += ((const Acc*)parts)[((i64)s * p.heads + head) * dim + d];
        store((T*)to + ((i64)p.hub_node[hub] * p.heads + head) * dim + d, sum);
    }
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) edge_sum_parts(const __grid_constant__ Params p) {
    const Place at = my_place(p);
    if (at.warp >= p.num_hubs || !at.is_real) return;
    sum_parts(p, p.part_out, p.dk != nullptr ? p.dk : p.dq, at.warp, at.head, p.head_dim);
    if (p.dv != nullptr) sum_parts(p, p.part_v, p.dv, at.warp, at.head, p.head_dim_v);
}
