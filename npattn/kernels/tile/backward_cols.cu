// backward_cols.cu: dk and dv by key tiles.
//
// The forward kernel turned round: a block owns BLOCK keys of one key head and OUT_COLS columns of their dk and dv;
// the queries of every head that reads this key head pass through shared memory, STEP at a time, with their m, 1 / l
// and delta. Four products a step, all with keys as rows: s = k q^T, dp = v dout^T, dv += w dout, dk += ds q.
// Heads and queries come in a fixed order, and no other block adds to the same place (but to dq, with ATOMIC_DQ).

struct ColumnStats {  // of the STEP queries of a stage, in shared memory behind its tiles
    Acc *m, *inverse_l, *delta;
    int *lo, *hi;
    u32 *r0, *r1;
    static constexpr int BYTES = STEP * (3 * (int)sizeof(Acc) + 16);
    __device__ __forceinline__ ColumnStats(void* base) {
        m = (Acc*)base, inverse_l = m + STEP, delta = inverse_l + STEP;
        lo = (int*)(delta + STEP), hi = lo + STEP, r0 = (u32*)(hi + STEP), r1 = r0 + STEP;
    }
};

// s and dp of the keys of one thread against STEP queries: dot products in; out, dp = the weights w that dout is
// summed with, s = ds before softcap times `factor`.
template <bool GUARDED>
__device__ __forceinline__ void backward_cols_step(const Params& p, const Step& step, int b, int h, int first, Acc factor,
                                                   const ColumnStats& stats, Acc (&s)[FRAGS][STEP / 8][4],
                                                   Acc (&dp)[FRAGS][STEP / 8][4]) {
#pragma unroll
    for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int c = n * 8 + (threadIdx.x & 3) * 2 + e, i = step.start + c;
            const QueryStats row = {stats.m[c], stats.inverse_l[c], stats.delta[c]};
            const DropRow drop = HAS_DROPOUT ? DropRow{stats.r0[c], stats.r1[c]} : DropRow{0, 0};
            int lo = 0, hi = p.len_k;
            if (GUARDED && step.kind == INTERVAL) lo = stats.lo[c], hi = stats.hi[c];
            if (GUARDED && i >= p.len_q) hi = 0;
            const Acc* bias = HAS_BIAS ? bias_row(p, b, h, min(i, p.len_q - 1)) : nullptr;
#pragma unroll
            for (int f = 0; f < FRAGS; ++f) {
                const int j0 = first + f * 16;
                u32 word = 0xffffffffu;  // both keys of a fragment are in the same word: it starts at a multiple of 16
                if (GUARDED && step.kind == BITS)
                    word = p.bits[((i64)step.bits * p.tile_q + i % p.tile_q) * (p.tile_k / 32) + j0 % p.tile_k / 32];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int j = j0 + half * 8;
                    bool visible = !GUARDED || (j >= lo && j < hi && (word >> (j & 31) & 1));
                    Acc added = 0, weight, ds, slope;
                    if (HAS_BIAS && visible) added = bias[j * p.bias_stride[3]], visible = added != minus_infinity();
                    const bool is_kept = !HAS_DROPOUT || kept(drop, j, p.drop_threshold);
                    Acc &x = s[f][n][half * 2 + e], &y = dp[f][n][half * 2 + e];
                    backward_pair(p, x, y, visible, added, row, is_kept, weight, ds, slope);
                    x = visible ? ds * slope * factor : Acc(0), y = weight;
                }
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_cols(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(shared);
    constexpr int DK_COLS = OUT_COLS < HEAD_DIM ? OUT_COLS : HEAD_DIM, DV_COLS = OUT_COLS < HEAD_DIM_V ? OUT_COLS : HEAD_DIM_V;
    const Tile<T, HEAD_DIM> sk{(T*)shared};
    const Tile<T, HEAD_DIM_V> sv{sk.base + sk.size(BLOCK)};
    unsigned char* const stages = (unsigned char*)(sv.base + sv.size(BLOCK));
    constexpr int TILES = (Tile<T, HEAD_DIM>::size(STEP) + Tile<T, HEAD_DIM_V>::size(STEP)) * (int)sizeof(T);
    constexpr int STAGE = TILES + ColumnStats::BYTES;

    const int num_blocks = (p.len_k + BLOCK - 1) / BLOCK, group = p.heads_q / p.heads_kv;
    constexpr int WIDEST = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V, CHUNKS = (WIDEST + OUT_COLS - 1) / OUT_COLS;
    int x = blockIdx.x;
    const int key0 = x % num_blocks * BLOCK;  // the first first: under a causal mask they are seen by the most
    x /= num_blocks;
    const int col0 = CHUNKS == 1 ? 0 : x % CHUNKS * OUT_COLS;
    x /= CHUNKS;
    const int g = x % p.heads_kv, b = x / p.heads_kv;

    const int lane = threadIdx.x & 31, first_row = threadIdx.x / 32 * 16 * FRAGS, first = key0 + first_row + lane / 4;
    Acc dk[FRAGS][DK_COLS / 8][4], dv[FRAGS][DV_COLS / 8][4];
#pragma unroll
    for (int f = 0; f < FRAGS; ++f)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
            for (int n = 0; n < DK_COLS / 8; ++n) dk[f][n][e] = 0;
#pragma unroll
            for (int n = 0; n < DV_COLS / 8; ++n) dv[f][n][e] = 0;
        }

    const auto query_row = [&](int h, int i) -> const T* { return i < p.len_q ? row_in(p.q, p.q_stride, b, h, i) : nullptr; };
    const auto dout_row = [&](int h, int i) -> const T* { return i < p.len_q ? row_in(p.dout, p.dout_stride, b, h, i) : nullptr; };
    const auto fetch = [&](int stage, int h, int start) {  // begin to copy STEP queries, their dout and statistics
        const Tile<T, HEAD_DIM> sq{(T*)(stages + stage * STAGE)};
        const Tile<T, HEAD_DIM_V> sdo{sq.base + sq.size(STEP)};
        load_tile(sq, STEP, p.head_dim, p.aligned_qk, [&](int r) { return query_row(h, start + r); });
        load_tile(sdo, STEP, p.head_dim_v, p.aligned_v, [&](int r) { return dout_row(h, start + r); });
        const ColumnStats stats(stages + stage * STAGE + TILES);
        const int list = list_of(p, b, h);
        for (int c = threadIdx.x; c < STEP; c += THREADS) {
            const int i = start + c;
            const bool is_real = i < p.len_q;
            const QueryStats row = is_real ? query_stats(p, flat_row(p, b, h, i)) : QueryStats{0, 0, 0};
            stats.m[c] = row.m, stats.inverse_l[c] = row.inverse_l, stats.delta[c] = row.delta;
            if (p.has_intervals && is_real) {
                stats.lo[c] = p.lo[(i64)list * p.len_q + i], stats.hi[c] = min(p.hi[(i64)list * p.len_q + i], p.len_k);
            }
            if (HAS_DROPOUT) {
                const DropRow drop = drop_row(p.seed_lo, p.seed_hi, b, h, i);
                stats.r0[c] = drop.r0, stats.r1[c] = drop.r1;
            }
        }
    };
    load_tile(sk, BLOCK, p.head_dim, p.aligned_qk,
              [&](int r) -> const T* { return key0 + r < p.len_k ? row_in(p.k, p.k_stride, b, g, key0 + r) : nullptr; });
    load_tile(sv, BLOCK, p.head_dim_v, p.aligned_v,
              [&](int r) -> const T* { return key0 + r < p.len_k ? row_in(p.v, p.v_stride, b, g, key0 + r) : nullptr; });

    Walk<false> walk(p);
    int head = -1;  // of the group; the walk of the next one begins where this one's ends
    const auto advance = [&](Step& step) {
        while (head < 0 || !walk.next(step)) {
            if (++head >= group) return false;
            walk.begin(list_of(p, b, g * group + head), key0 / p.tile_k);
        }
        return true;
    };
    Step step, next;
    bool more = advance(step);
    int h = g * group + head;
    if (more) fetch(0, h, step.start);
    dev::copy_async_wait_all();  // also when there is no step: k and v are on their way
#if ATOMIC_DQ
    const Tile<T, BLOCK> sds{(T*)(stages + STAGES * STAGE)};
    // What is masked must not reach dq. A query that sees inf or NaN in a key has them in its m and l already.
    clean_tile(sk, BLOCK);
#endif
    const Acc factor = ds_factor(p, false) * scale_before(p);
    for (int stage = 0; more; stage ^= STAGES - 1) {
        const bool again = advance(next);
        const int next_h = g * group + head;
        const Tile<T, HEAD_DIM> sq{(T*)(stages + stage * STAGE)};
        const Tile<T, HEAD_DIM_V> sdo{sq.base + sq.size(STEP)};
        const ColumnStats stats(stages + stage * STAGE + TILES);
        const bool guarded = HAS_BIAS || step.kind != FULL || step.start + STEP > p.len_q;
        dev::copy_async_wait_all();
        const bool unclean = guarded && (clean_tile(sq, STEP) | clean_tile(sdo, STEP));
        // everybody's part of this step has landed; nobody reads the other stage any more
        const bool any_unclean = __syncthreads_or(unclean);
        if (STAGES == 2 && again) fetch(stage ^ 1, next_h, next.start);

        Acc s[FRAGS][STEP / 8][4], dp[FRAGS][STEP / 8][4];
        multiply_rows(s, sk, first_row, sq, scale_before(p));
        multiply_rows(dp, sv, first_row, sdo, Acc(1));
        if (guarded) backward_cols_step<true>(p, step, b, h, first, factor, stats, s, dp);
        else backward_cols_step<HAS_BIAS>(p, step, b, h, first, factor, stats, s, dp);
        if (any_unclean) {
            find_bad_rows(sq, STEP, p.head_dim, [&](int r) { return query_row(h, step.start + r); });
            find_bad_rows(sdo, STEP, p.head_dim_v, [&](int r) { return dout_row(h, step.start + r); });
            __syncthreads();  // the rows are marked
            add_bad_rows(dv, dp, sdo, col0, p.head_dim_v, [&](int r) { return dout_row(h, step.start + r); });
            add_bad_rows(dk, s, sq, col0, p.head_dim, [&](int r) { return query_row(h, step.start + r); });
        }
        if (CHUNKS == 1 || col0 < HEAD_DIM_V) multiply_into(dv, dp, sdo, col0);
        if (CHUNKS == 1 || col0 < HEAD_DIM) multiply_into(dk, s, sq, col0);
#if ATOMIC_DQ
        add_to_dq(p, step, b, h, key0, first_row, s, sds, sk);
#endif

        if (STAGES == 1) {
            __syncthreads();  // nobody reads the only stage any more
            if (again) fetch(0, next_h, next.start);
        }
        step = next, more = again, h = next_h;
    }

    const Acc undo = ds_factor(p, true) * scale_after(p);
#pragma unroll
    for (int r = 0; r < 2 * FRAGS; ++r) {
        const int j = first + r / 2 * 16 + r % 2 * 8;
        if (j >= p.len_k) continue;
        const i64 flat = ((i64)b * p.heads_kv + g) * p.len_k + j;
#pragma unroll
        for (int n = 0; n < DK_COLS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int d = col0 + n * 8 + (lane & 3) * 2 + e;
                if (d < p.head_dim) store((T*)p.dk + flat * p.head_dim + d, dk[r / 2][n][r % 2 * 2 + e] * undo);
            }
#pragma unroll
        for (int n = 0; n < DV_COLS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int d = col0 + n * 8 + (lane & 3) * 2 + e;
                if (d < p.head_dim_v) store((T*)p.dv + flat * p.head_dim_v + d, dv[r / 2][n][r % 2 * 2 + e] * (Acc)p.keep_scale);
            }
    }
}
