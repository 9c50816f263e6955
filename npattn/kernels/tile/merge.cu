// merge.cu: joins the parts of a split-key call into out, m and l.
//
// One warp a row of (batch, head, query), parts in ascending order; memory-bound and small beside the parts.

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_merge(const __grid_constant__ Params p) {
    const i64 row = ((i64)blockIdx.x * THREADS + threadIdx.x) / 32;
    const int lane = threadIdx.x & 31;
    if (row >= p.part_rows) return;
    const Acc* part_m = (const Acc*)p.part_m + row;
    const Acc* part_l = (const Acc*)p.part_l + row;
    const Acc* part_out = (const Acc*)p.part_out + row * p.head_dim_v;
    const Acc sink = p.sinks != nullptr ? ((const Acc*)p.sinks)[row / p.len_q % p.heads_q] : minus_infinity();
    Acc m = sink;
    for (int s = 0; s < p.num_splits; ++s) m = larger(m, part_m[s * p.part_rows]);
    const Acc pivot = m == minus_infinity() ? Acc(0) : m;
    Acc l = weight_for<T>(sink - pivot);
    for (int s = 0; s < p.num_splits; ++s) l += part_l[s * p.part_rows] * exp_of(part_m[s * p.part_rows] - pivot);
    if (lane == 0) ((Acc*)p.m)[row] = l != Acc(0) ? m : Acc(0), ((Acc*)p.l)[row] = l / unit();
    const Acc norm = l > Acc(0) ? (Acc)p.keep_scale / l : l;
    for (int d = lane; d < p.head_dim_v; d += 32) {
        Acc y = 0;
        for (int s = 0; s < p.num_splits; ++s) {
            const Acc weight = exp_of(part_m[s * p.part_rows] - pivot);
            if (weight > Acc(0)) y += part_out[s * p.part_rows * p.head_dim_v + d] * weight;
        }
        store_out(p, row * p.head_dim_v + d, y * norm);
    }
}
