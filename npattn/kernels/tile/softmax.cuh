// softmax.cuh: the rows of a forward kernel from the first key to the last: online softmax, and what is written at the end.
//
// A thread has parts of 2 * FRAGS rows: of each the columns where a product of its warp leaves them (tile.cuh), the
// running maximum m, its part of the running sum l, and its part of the unnormalised output acc.

// Row `r` of all rows the block's (batch, head) has: DECODE packs the heads of a group.
__device__ __forceinline__ void place_row(const Params& p, int r, int first_head, int& i, int& h) {
    const int group = DECODE ? p.heads_q / p.heads_kv : 1;
    i = r / group, h = first_head + r % group;
}
__device__ __forceinline__ i64 flat_row(const Params& p, int b, int h, int i) {
    return ((i64)b * p.heads_q + h) * p.len_q + i;
}

struct Rows {        // the rows of one thread: row r of 2 * FRAGS is number first + r / 2 * 16 + r % 2 * 8
    int b, first_head, first, count;
    __device__ __forceinline__ int number(int r) const { return min(first + r / 2 * 16 + r % 2 * 8, count - 1); }
    __device__ __forceinline__ bool is_real(int r) const { return first + r / 2 * 16 + r % 2 * 8 < count; }
};

__device__ __forceinline__ void begin_rows(const Params& p, const Rows& rows, Acc (&m)[2 * FRAGS], Acc (&l)[2 * FRAGS],
                                           Acc (&acc)[FRAGS][OUT_COLS / 8][4]) {
#pragma unroll
    for (int r = 0; r < 2 * FRAGS; ++r) {
        // A sink is a key without a value that everybody has already seen (attention_merge adds it to parts).
        m[r] = p.sinks != nullptr && !DECODE ? ((const Acc*)p.sinks)[rows.first_head] : minus_infinity();
        l[r] = m[r] > minus_infinity() && (threadIdx.x & 3) == 0 ? unit() : Acc(0);
#pragma unroll
        for (int n = 0; n < OUT_COLS / 8; ++n) acc[r / 2][n][r % 2 * 2] = 0, acc[r / 2][n][r % 2 * 2 + 1] = 0;
    }
}

__device__ __forceinline__ void multiply_row(Acc (&acc)[FRAGS][OUT_COLS / 8][4], int r, Acc factor) {
    if (!__any_sync(WARP_ALL, factor != Acc(1))) return;
#pragma unroll
    for (int n = 0; n < OUT_COLS / 8; ++n) acc[r / 2][n][r % 2 * 2] *= factor, acc[r / 2][n][r % 2 * 2 + 1] *= factor;
}

// s: dot products in, unnormalised weights (times unit()) out (before dropout they are added to l; after it they go on to V).
// GUARDED: the step may hold masked pairs.
// rescale(r, factor) is called for each row r: what acc holds so far must be multiplied by it.
template <bool GUARDED, class Rescale>
__device__ __forceinline__ void online_softmax(const Params& p, const Step& step, const Rows& rows,
                                               Acc (&s)[FRAGS][STEP / 8][4], Acc (&m)[2 * FRAGS], Acc (&l)[2 * FRAGS],
                                               Rescale rescale) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2 * FRAGS; ++r) {
        const int f = r / 2, e0 = r % 2 * 2;
        int i = 0, h = 0, lo = 0, hi = p.len_k;
        if (GUARDED || HAS_DROPOUT) place_row(p, rows.number(r), rows.first_head, i, h);
        const u32* words = nullptr;
        const Acc* bias = nullptr;
        if (GUARDED && step.kind == INTERVAL) {
            const i64 at = (i64)list_of(p, rows.b, rows.first_head) * p.len_q + i;
            lo = p.lo[at], hi = min(p.hi[at], p.len_k);
        }
        if (GUARDED && step.kind == BITS) words = p.bits + ((i64)step.bits * p.tile_q + i % p.tile_q) * (p.tile_k / 32);
        if (HAS_BIAS) bias = (const Acc*)p.bias + rows.b * p.bias_stride[0] + h * p.bias_stride[1] + i * p.bias_stride[2];

        Acc largest = m[r];
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n) {
            const int j0 = step.start + n * 8 + 2 * t;
            u32 word = 0xffffffffu;
            if (GUARDED && words != nullptr) word = words[j0 % p.tile_k / 32] >> (j0 & 31);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                Acc& x = s[f][n][e0 + e];
                Acc capped;
                x = logit_of(p, x, capped);
                if (GUARDED) {
                    const int j = j0 + e;
                    const bool visible = j >= lo && j < hi && (word >> e & 1);
                    if (HAS_BIAS && visible) x += bias[j * p.bias_stride[3]];
                    // NaN + -inf is NaN: what the bias masks is set, not added
                    if (!visible || (HAS_BIAS && bias[j * p.bias_stride[3]] == minus_infinity())) x = minus_infinity();
                }
                largest = larger(largest, x);
            }
        }
        largest = quad_max(largest);
        // A row that has seen nothing yet has maximum -inf, and -inf - -inf is NaN: any finite pivot serves it.
        const Acc pivot = largest == minus_infinity() ? Acc(0) : largest;
        const Acc shrink = exp_of(m[r] - pivot);
        m[r] = largest, l[r] *= shrink;
        rescale(r, shrink);
        DropRow drop;
        if (HAS_DROPOUT) drop = drop_row(p.seed_lo, p.seed_hi, rows.b, h, i);
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                Acc& x = s[f][n][e0 + e];
                x = weight_for<T>(x - pivot);
                l[r] += x;
                if (HAS_DROPOUT && !kept(drop, step.start + n * 8 + 2 * t + e, p.drop_threshold)) x = 0;
            }
    }
}

// out, m and l of columns col0 .. col0 + OUT_COLS (DECODE: of part `part`).
__device__ __forceinline__ void write_rows(const Params& p, const Rows& rows, int part, int col0, const Acc (&m)[2 * FRAGS],
                                           const Acc (&l)[2 * FRAGS], const Acc (&acc)[FRAGS][OUT_COLS / 8][4]) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2 * FRAGS; ++r) {
        const Acc sum = quad_sum(l[r]);
        if (!rows.is_real(r)) continue;
        int i, h;
        place_row(p, rows.number(r), rows.first_head, i, h);
        const i64 flat = flat_row(p, rows.b, h, i);
        const Acc norm = DECODE ? Acc(1) : sum > Acc(0) ? (Acc)p.keep_scale / sum : sum;  // NaN stays NaN
        if (t == 0 && col0 == 0) {
            const i64 at = DECODE ? part * p.part_rows + flat : flat;
            ((Acc*)(DECODE ? p.part_m : p.m))[at] = DECODE || sum != Acc(0) ? m[r] : Acc(0);
            ((Acc*)(DECODE ? p.part_l : p.l))[at] = DECODE ? sum : sum / unit();
        }
#pragma unroll
        for (int n = 0; n < OUT_COLS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int d = col0 + n * 8 + t * 2 + e;
                if (d >= p.head_dim_v) continue;
                const Acc y = acc[r / 2][n][r % 2 * 2 + e] * norm;
                if (DECODE) ((Acc*)p.part_out)[(part * p.part_rows + flat) * p.head_dim_v + d] = y;
                else store_out(p, flat * p.head_dim_v + d, y);
            }
    }
}
