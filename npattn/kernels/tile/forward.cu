// forward.cu: attention forward by query tiles, online softmax, walking a TilePlan.
//
// A block owns BLOCK query rows of one head (DECODE: of all query heads that share one key head) and OUT_COLS
// columns of their output; each warp owns 16 * FRAGS of these rows from beginning to end, so that softmax needs
// no other warp. Keys and values pass through shared memory STEP at a time, the next ones on their way while the
// present ones are used. In registers: acc (unnormalised output), m (running maximum), l (running sum, one part
// in each of the four threads of a row). No two blocks write the same place.
//
// DECODE 1 is for few queries and many keys: a grid axis splits the keys, each block writes acc, m, l of its part
// to part_*, and attention_merge joins them in a fixed order.

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

// s: dot products in, unnormalised weights (times unit()) out (before dropout they are added to l; after it they go on to V).
// GUARDED: the step may hold masked pairs.
template <bool GUARDED>
__device__ __forceinline__ void online_softmax(const Params& p, const Step& step, const Rows& rows,
                                               Acc (&s)[FRAGS][STEP / 8][4], Acc (&m)[2 * FRAGS], Acc (&l)[2 * FRAGS],
                                               Acc (&acc)[FRAGS][OUT_COLS / 8][4]) {
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
        if (__any_sync(WARP_ALL, shrink != Acc(1))) {
#pragma unroll
            for (int n = 0; n < OUT_COLS / 8; ++n) acc[f][n][e0] *= shrink, acc[f][n][e0 + 1] *= shrink;
        }
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(shared);
    const Tile<T, HEAD_DIM> sq{(T*)shared};
    T* const stages = sq.base + sq.size(BLOCK);
    constexpr int STAGE = Tile<T, HEAD_DIM>::size(STEP) + Tile<T, OUT_COLS>::size(STEP);

    // Which rows: the last first, for under a causal mask they have the most to do.
    const int group = p.heads_q / p.heads_kv;
    const int rows_in_all = DECODE ? p.len_q * group : p.len_q, heads = DECODE ? p.heads_kv : p.heads_q;
    const int num_blocks = (rows_in_all + BLOCK - 1) / BLOCK;
    constexpr int CHUNKS = (HEAD_DIM_V + OUT_COLS - 1) / OUT_COLS;
    int x = blockIdx.x;
    const int row0 = (num_blocks - 1 - x % num_blocks) * BLOCK;
    x /= num_blocks;
    const int col0 = CHUNKS == 1 ? 0 : x % CHUNKS * OUT_COLS;
    x /= CHUNKS;
    const int first_head = x % heads * (DECODE ? group : 1), g = DECODE ? x % heads : first_head / group;
    x /= heads;
    const int b = x % p.batch, part = x / p.batch;

    const int lane = threadIdx.x & 31, first_row = threadIdx.x / 32 * 16 * FRAGS;
    const Rows rows{b, first_head, row0 + first_row + lane / 4, rows_in_all};
    Acc m[2 * FRAGS], l[2 * FRAGS], acc[FRAGS][OUT_COLS / 8][4];
#pragma unroll
    for (int r = 0; r < 2 * FRAGS; ++r) {
        // A sink is a key without a value that everybody has already seen (attention_merge adds it to parts).
        m[r] = p.sinks != nullptr && !DECODE ? ((const Acc*)p.sinks)[first_head] : minus_infinity();
        l[r] = m[r] > minus_infinity() && (lane & 3) == 0 ? unit() : Acc(0);
#pragma unroll
        for (int n = 0; n < OUT_COLS / 8; ++n) acc[r / 2][n][r % 2 * 2] = 0, acc[r / 2][n][r % 2 * 2 + 1] = 0;
    }

    // Row j of k or v, from its column `col` on; null behind the last key.
    const auto key_row = [&](const void* base, const i64* stride, int col, int j) -> const T* {
        if (j >= p.len_k) return nullptr;
        const int* pages = p.page_table + (i64)b * p.pages_per_sequence;
        const i64 outer = PAGED ? pages[j / p.page_size] : b, inner = PAGED ? j % p.page_size : j;
        return (const T*)base + outer * stride[0] + g * stride[1] + inner * stride[2] + col;
    };
    const auto fetch = [&](int stage, int start) {  // begin to copy STEP keys and values
        const Tile<T, HEAD_DIM> sk{stages + stage * STAGE};
        const Tile<T, OUT_COLS> sv{sk.base + sk.size(STEP)};
        load_tile(sk, STEP, p.head_dim, p.aligned_qk, [&](int r) { return key_row(p.k, p.k_stride, 0, start + r); });
        load_tile(sv, STEP, p.head_dim_v - col0, p.aligned_v, [&](int r) { return key_row(p.v, p.v_stride, col0, start + r); });
    };
    load_tile(sq, BLOCK, p.head_dim, p.aligned_qk, [&](int r) -> const T* {
        if (row0 + r >= rows_in_all) return nullptr;
        int i, h;
        place_row(p, row0 + r, first_head, i, h);
        return (const T*)p.q + b * p.q_stride[0] + h * p.q_stride[1] + i * p.q_stride[2];
    });

    Walk<true> walk(p);
    walk.begin(list_of(p, b, first_head), DECODE ? 0 : row0 / p.tile_q);
    if (DECODE) walk.take_part(part, p.num_splits);
    Step step, next;
    bool more = walk.next(step);
    if (more) fetch(0, step.start);
    dev::copy_async_wait_all();  // also when there is no step: q is on its way
    for (int stage = 0; more; stage ^= STAGES - 1) {
        const bool again = walk.next(next);
        const Tile<T, HEAD_DIM> sk{stages + stage * STAGE};
        const Tile<T, OUT_COLS> sv{sk.base + sk.size(STEP)};
        const bool guarded = HAS_BIAS || step.kind != FULL || step.start + STEP > p.len_k;
        dev::copy_async_wait_all();
        const bool unclean = guarded && clean_tile(sv, STEP);
        // everybody's part of this step has landed; nobody reads the other stage any more
        const bool any_unclean = __syncthreads_or(unclean);
        if (STAGES == 2 && again) fetch(stage ^ 1, next.start);

        Acc s[FRAGS][STEP / 8][4];
        multiply_rows(s, sq, first_row, sk, scale_before(p));
        if (guarded) online_softmax<true>(p, step, rows, s, m, l, acc);
        else online_softmax<HAS_BIAS>(p, step, rows, s, m, l, acc);
        if (any_unclean) {
            find_bad_rows(sv, STEP, p.head_dim_v - col0, [&](int r) { return key_row(p.v, p.v_stride, col0, step.start + r); });
            __syncthreads();  // the rows are marked
            add_bad_rows(acc, s, sv, 0, p.head_dim_v - col0, [&](int r) { return key_row(p.v, p.v_stride, col0, step.start + r); });
        }
        multiply_into(acc, s, sv, 0);
        if (STAGES == 1) {
            __syncthreads();  // nobody reads the only stage any more
            if (again) fetch(0, next.start);
        }
        step = next, more = again;
    }

#pragma unroll
    for (int r = 0; r < 2 * FRAGS; ++r) {
        const Acc sum = quad_sum(l[r]);
        if (!rows.is_real(r)) continue;
        int i, h;
        place_row(p, rows.number(r), first_head, i, h);
        const i64 flat = flat_row(p, b, h, i);
        const Acc norm = DECODE ? Acc(1) : sum > Acc(0) ? (Acc)p.keep_scale / sum : sum;  // NaN stays NaN
        if ((lane & 3) == 0 && col0 == 0) {
            const i64 at = DECODE ? part * p.part_rows + flat : flat;
            ((Acc*)(DECODE ? p.part_m : p.m))[at] = DECODE || sum != Acc(0) ? m[r] : Acc(0);
            ((Acc*)(DECODE ? p.part_l : p.l))[at] = DECODE ? sum : sum / unit();
        }
#pragma unroll
        for (int n = 0; n < OUT_COLS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int d = col0 + n * 8 + (lane & 3) * 2 + e;
                if (d >= p.head_dim_v) continue;
                const Acc y = acc[r / 2][n][r % 2 * 2 + e] * norm;
                if (DECODE) ((Acc*)p.part_out)[(part * p.part_rows + flat) * p.head_dim_v + d] = y;
                else store((T*)p.out + flat * p.head_dim_v + d, y);
            }
    }
}
