// backward_rows.cu: delta and dsinks, then dq by query tiles.
//
// attention_backward_rows is built as the forward kernel is: a block owns BLOCK query rows of one head and OUT_COLS
// columns of their dq; keys and values pass through shared memory. Three products a step: s = q k^T, dp = dout v^T,
// dq += ds k. dk and dv are another pass (backward_cols.cu) that computes s and dp again: seven products where five
// would do, but nobody adds to what somebody else adds to, so results are the same bit for bit every time.

// delta[b, h, i] = sum of dout * (out + rest) where that is not 0, less dlse: one warp a row. A row that sees no key has
// out 0, and its dout may be anything.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_delta(const __grid_constant__ Params p) {
    const i64 row = ((i64)blockIdx.x * THREADS + threadIdx.x) / 32;
    const int lane = threadIdx.x & 31;
    if (row >= (i64)p.batch * p.heads_q * p.len_q) return;
    const int i = (int)(row % p.len_q), h = (int)(row / p.len_q % p.heads_q), b = (int)(row / p.len_q / p.heads_q);
    const T* out = row_in(p.out, p.out_stride, b, h, i);
    const T* dout = row_in(p.dout, p.dout_stride, b, h, i);
    Acc sum = 0, largest = 0;
    for (int d = lane; d < p.head_dim_v; d += 32) {
        const Acc dx = to_acc(dout[d]);
        Acc x = to_acc(out[d]);
        if (sizeof(T) == 2 && p.rest != nullptr) x += to_acc(((const T*)p.rest)[row * p.head_dim_v + d]);
        if (x != Acc(0)) sum += x * dx;
        if (is_finite(dx)) largest = larger(largest, dx < Acc(0) ? -dx : dx);
    }
    sum = warp_sum(sum), largest = warp_max(largest);
    if (lane != 0) return;
    ((Acc*)p.delta)[row] = p.dlse != nullptr ? sum - ((const Acc*)p.dlse)[row] : sum;
    if (Same<T, f16>::value) atomicMax((u32*)p.absmax, __float_as_uint((float)largest));  // order does not matter
}

// dsinks[h] = -sum over batch and queries of exp(sink - m) / l * delta: one block a head, always in the same order.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_dsinks(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(shared);
    double* const sums = (double*)shared;  // (THREADS,)
    const int h = blockIdx.x;
    const Acc sink = ((const Acc*)p.sinks)[h];
    double sum = 0;
    for (i64 n = threadIdx.x; n < (i64)p.batch * p.len_q; n += THREADS) {
        const QueryStats row = query_stats(p, flat_row(p, (int)(n / p.len_q), h, (int)(n % p.len_q)));
        const Acc weight = exp_of(sink - row.m) * row.inverse_l;
        if (weight > Acc(0)) sum -= weight * row.delta;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();  // all partial sums are there
    if (threadIdx.x != 0) return;
    for (int n = 1; n < THREADS; ++n) sum += sums[n];
    ((Acc*)p.dsinks)[h] = (Acc)sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_rows(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(shared);
    const Tile<T, HEAD_DIM> sq{(T*)shared};
    const Tile<T, HEAD_DIM_V> sdo{sq.base + sq.size(BLOCK)};
    T* const stages = sdo.base + sdo.size(BLOCK);
    constexpr int STAGE = Tile<T, HEAD_DIM>::size(STEP) + Tile<T, HEAD_DIM_V>::size(STEP);

    const int num_blocks = (p.len_q + BLOCK - 1) / BLOCK;
    constexpr int CHUNKS = (HEAD_DIM + OUT_COLS - 1) / OUT_COLS;
    int x = blockIdx.x;
    const int row0 = (num_blocks - 1 - x % num_blocks) * BLOCK;  // the last first: under a causal mask the longest
    x /= num_blocks;
    const int col0 = CHUNKS == 1 ? 0 : x % CHUNKS * OUT_COLS;
    x /= CHUNKS;
    const int h = x % p.heads_q, g = h / (p.heads_q / p.heads_kv), b = x / p.heads_q;

    const int lane = threadIdx.x & 31, first_row = threadIdx.x / 32 * 16 * FRAGS, first = row0 + first_row + lane / 4;
    QueryStats stats[2 * FRAGS];
    Acc dq[FRAGS][OUT_COLS / 8][4];
#pragma unroll
    for (int r = 0; r < 2 * FRAGS; ++r) {
        stats[r] = query_stats(p, flat_row(p, b, h, min(first + r / 2 * 16 + r % 2 * 8, p.len_q - 1)));
#pragma unroll
        for (int n = 0; n < OUT_COLS / 8; ++n) dq[r / 2][n][r % 2 * 2] = 0, dq[r / 2][n][r % 2 * 2 + 1] = 0;
    }

    const auto key_row = [&](int j) -> const T* { return j < p.len_k ? row_in(p.k, p.k_stride, b, g, j) : nullptr; };
    const auto value_row = [&](int j) -> const T* { return j < p.len_k ? row_in(p.v, p.v_stride, b, g, j) : nullptr; };
    const auto fetch = [&](int stage, int start) {  // begin to copy STEP keys and values
        const Tile<T, HEAD_DIM> sk{stages + stage * STAGE};
        const Tile<T, HEAD_DIM_V> sv{sk.base + sk.size(STEP)};
        load_tile(sk, STEP, p.head_dim, p.aligned_qk, [&](int r) { return key_row(start + r); });
        load_tile(sv, STEP, p.head_dim_v, p.aligned_v, [&](int r) { return value_row(start + r); });
    };
    load_tile(sq, BLOCK, p.head_dim, p.aligned_qk,
              [&](int r) -> const T* { return row0 + r < p.len_q ? row_in(p.q, p.q_stride, b, h, row0 + r) : nullptr; });
    load_tile(sdo, BLOCK, p.head_dim_v, p.aligned_v,
              [&](int r) -> const T* { return row0 + r < p.len_q ? row_in(p.dout, p.dout_stride, b, h, row0 + r) : nullptr; });

    Walk<true> walk(p);
    walk.begin(list_of(p, b, h), row0 / p.tile_q);
    Step step, next;
    bool more = walk.next(step);
    if (more) fetch(0, step.start);
    dev::copy_async_wait_all();  // also when there is no step: q and dout are on their way
    const Acc factor = ds_factor(p, false) * scale_before(p);
    for (int stage = 0; more; stage ^= STAGES - 1) {
        const bool again = walk.next(next);
        const Tile<T, HEAD_DIM> sk{stages + stage * STAGE};
        const Tile<T, HEAD_DIM_V> sv{sk.base + sk.size(STEP)};
        const bool guarded = HAS_BIAS || step.kind != FULL || step.start + STEP > p.len_k;
        dev::copy_async_wait_all();
        const bool unclean = guarded && clean_tile(sk, STEP);
        // everybody's part of this step has landed; nobody reads the other stage any more
        const bool any_unclean = __syncthreads_or(unclean);
        if (STAGES == 2 && again) fetch(stage ^ 1, next.start);

        Acc s[FRAGS][STEP / 8][4], dp[FRAGS][STEP / 8][4];
        multiply_rows(s, sq, first_row, sk, scale_before(p));
        multiply_rows(dp, sdo, first_row, sv, Acc(1));
        if (guarded) backward_rows_step<true>(p, step, b, h, first, false, factor, stats, s, dp);
        else backward_rows_step<HAS_BIAS>(p, step, b, h, first, false, factor, stats, s, dp);
        if (any_unclean) {
            find_bad_rows(sk, STEP, p.head_dim, [&](int r) { return key_row(step.start + r); });
            __syncthreads();  // the rows are marked
            add_bad_rows(dq, s, sk, col0, p.head_dim, [&](int r) { return key_row(step.start + r); });
        }
        multiply_into(dq, s, sk, col0);

        if (STAGES == 1) {
            __syncthreads();  // nobody reads the only stage any more
            if (again) fetch(0, next.start);
        }
        step = next, more = again;
    }

    const Acc undo = ds_factor(p, true) * scale_after(p);
#pragma unroll
    for (int r = 0; r < 2 * FRAGS; ++r) {
        const int i = first + r / 2 * 16 + r % 2 * 8;
        if (i >= p.len_q) continue;
        T* const row = (T*)p.dq + flat_row(p, b, h, i) * p.head_dim;
#pragma unroll
        for (int n = 0; n < OUT_COLS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int d = col0 + n * 8 + (lane & 3) * 2 + e;
                if (d < p.head_dim) store(row + d, dq[r / 2][n][r % 2 * 2 + e] * undo);
            }
    }
}
