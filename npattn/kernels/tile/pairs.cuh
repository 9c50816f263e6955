// pairs.cuh: the backward formula of one (query, key) pair, used by all backward passes.
//
// p is computed again from the dot product and the row's m and l; nothing of size len_q x len_k is ever stored.

struct QueryStats {    // of one query row
    Acc m, inverse_l;  // inverse_l = 0 for a row that sees nothing
    Acc delta;         // rowsum(dout * out) - dlse
};
__device__ __forceinline__ QueryStats query_stats(const Params& p, i64 flat) {
    const Acc l = ((const Acc*)p.l)[flat];
    return {((const Acc*)p.m)[flat], l != Acc(0) ? Acc(1) / l : Acc(0), ((const Acc*)p.delta)[flat]};
}

// In: the dot products q.k and dout.v. Out: the weight v was multiplied by, without the factor keep_scale, and ds
// of the logits after bias. `slope` is d(logit after softcap) / d(logit before).
__device__ __forceinline__ void backward_pair(const Params& p, Acc dot, Acc dp, bool visible, Acc bias, const QueryStats& row,
                                              bool is_kept, Acc& weight, Acc& ds, Acc& slope) {
    Acc capped;
    const Acc logit = logit_of(p, dot, capped) + bias;
    slope = HAS_SOFTCAP ? 1 - capped / (Acc)p.softcap * (capped / (Acc)p.softcap) : Acc(1);
    weight = exp_of(logit - row.m) * row.inverse_l;
    if (HAS_DROPOUT) dp = is_kept ? dp * (Acc)p.keep_scale : Acc(0);
    ds = weight * (dp - row.delta);
    if (HAS_DROPOUT && !is_kept) weight = 0;
    if (!visible) weight = 0, ds = 0;  // set, not multiplied: what a masked pair holds may be NaN
}

// float16 keeps 2^-24 .. 65504 only, and ds is as large as dout: ds is carried times a power of two that brings the
// largest |dout| to 1 .. 2. Exact, and undone in the results.
__device__ __forceinline__ Acc ds_factor(const Params& p, bool inverse) {
    if (!Same<T, f16>::value) return 1;
    const u32 exponent = min(max(*(const u32*)p.absmax >> 23, 1u), 253u);
    return (Acc)__uint_as_float((inverse ? exponent : 254u - exponent) << 23);
}

__device__ __forceinline__ i64 flat_row(const Params& p, int b, int h, int i) {
    return ((i64)b * p.heads_q + h) * p.len_q + i;
}
__device__ __forceinline__ const Acc* bias_row(const Params& p, int b, int h, int i) {
    return (const Acc*)p.bias + b * p.bias_stride[0] + h * p.bias_stride[1] + i * p.bias_stride[2];
}
__device__ __forceinline__ const T* row_in(const void* base, const i64* stride, int b, int h, int i) {
    return (const T*)base + b * stride[0] + h * stride[1] + i * stride[2];
}

// s and dp of the rows of one thread against STEP keys from step.start: dot products in; out, s = ds of the logits
// before softcap times `factor`, or after bias where `of_bias`.
template <bool GUARDED>
__device__ __forceinline__ void backward_rows_step(const Params& p, const Step& step, int b, int h, int first, bool of_bias,
                                                   Acc factor, const QueryStats (&stats)[2 * FRAGS],
                                                   Acc (&s)[FRAGS][STEP / 8][4], const Acc (&dp)[FRAGS][STEP / 8][4]) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2 * FRAGS; ++r) {
        const int f = r / 2, i = min(first + f * 16 + r % 2 * 8, p.len_q - 1);
        int lo = 0, hi = p.len_k;
        const u32* words = nullptr;
        if (GUARDED && step.kind == INTERVAL) {
            const i64 at = (i64)list_of(p, b, h) * p.len_q + i;
            lo = p.lo[at], hi = min(p.hi[at], p.len_k);
        }
        if (GUARDED && step.kind == BITS) words = p.bits + ((i64)step.bits * p.tile_q + i % p.tile_q) * (p.tile_k / 32);
        const Acc* bias = HAS_BIAS ? bias_row(p, b, h, i) : nullptr;
        DropRow drop;
        if (HAS_DROPOUT) drop = drop_row(p.seed_lo, p.seed_hi, b, h, i);
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            const int j0 = step.start + n * 8 + 2 * t;
            u32 word = 0xffffffffu;
            if (GUARDED && words != nullptr) word = words[j0 % p.tile_k / 32] >> (j0 & 31);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int j = j0 + e;
                bool visible = !GUARDED || (j >= lo && j < hi && (word >> e & 1));
                Acc added = 0, weight, ds, slope;
                if (HAS_BIAS && visible) added = bias[j * p.bias_stride[3]], visible = added != minus_infinity();
                const bool is_kept = !HAS_DROPOUT || kept(drop, j, p.drop_threshold);
                Acc& x = s[f][n][r % 2 * 2 + e];
                backward_pair(p, x, dp[f][n][r % 2 * 2 + e], visible, added, stats[r], is_kept, weight, ds, slope);
                x = of_bias ? ds : visible ? ds * slope * factor : Acc(0);
            }
        }
    }
}
