// forward_wgmma.cu: forward.cu for sm_90a, with float16 and bfloat16 and up to 128 columns a head.
//
// The same rows, the same walk, the same softmax; other hands. A block has three warpgroups of 128 threads:
//
//     the copier         keys and values from memory to shared memory, ahead of their use
//     two multipliers    64 query rows each: s = q k^T and acc += p v by wgmma, softmax between
//
// The copier gives up registers, the multipliers take them. A multiplier has two products in flight: s of step n, then
// acc of step n - 1; while the second runs it turns the first into weights. So what they need at a time is the *pair* n:
// the keys of step n and the values of step n - 1. A barrier in shared memory says that the pair is there (`full`), one
// that the keys of a step are done with, one that the values are (`empty`). The tiles of step n lie in stage
// n % STAGES and are the (n / STAGES)-th to lie there, which gives the parity to wait for.
//
// The two multipliers take turns at beginning their products, so that one multiplies while the other does softmax.

constexpr int COPIERS = 128, MULTIPLIER_WARPS = WARPS;
constexpr bool IS_F16 = Same<T, f16>::value;
using KeyPanels = Panels<STEP, HEAD_DIM>;
using ValuePanels = Panels<STEP, HEAD_DIM_V>;
using QueryPanels = Panels<BLOCK, HEAD_DIM>;
static_assert(FRAGS == 1 && BLOCK == 128 && OUT_COLS == HEAD_DIM_V, "as this file is written");

struct Shared {  // the block's shared memory: tiles, then barriers
    static constexpr int KEYS = QueryPanels::BYTES, VALUES = KEYS + STAGES * KeyPanels::BYTES,
                         BARRIERS = VALUES + STAGES * ValuePanels::BYTES;
    unsigned char* base;
    __device__ __forceinline__ QueryPanels q() const { return {base}; }
    __device__ __forceinline__ KeyPanels k(int n) const { return {base + KEYS + n % STAGES * KeyPanels::BYTES}; }
    __device__ __forceinline__ ValuePanels v(int n) const { return {base + VALUES + n % STAGES * ValuePanels::BYTES}; }
    __device__ __forceinline__ u64* barrier(int kind, int n) const {
        return (u64*)(base + BARRIERS) + kind * STAGES + n % STAGES;
    }
    __device__ __forceinline__ u64* full(int pair) const { return barrier(0, pair); }
    __device__ __forceinline__ u64* k_empty(int n) const { return barrier(1, n); }
    __device__ __forceinline__ u64* v_empty(int n) const { return barrier(2, n); }
    // The last step whose values held inf or NaN and were cleaned, plus one.
    __device__ __forceinline__ volatile int* unclean(int n) const { return (volatile int*)barrier(3, 0) + n % STAGES; }
};
__device__ __forceinline__ u32 parity(int n) { return n / STAGES & 1; }

struct Block {  // what a block works on
    int b, h, g, row0;
};

__device__ __forceinline__ bool may_hold_masked(const Params& p, const Step& step) {
    return HAS_BIAS || step.kind != FULL || step.start + STEP > p.len_k;
}

// ================================================================================================== the copier

// Row r of `panels` from base + (first + r) * stride, zeros from row `count` on and from column `cols` on. A thread has
// one column of chunks and every (COPIERS / CHUNKS)-th row.
template <int ROWS, int COLS>
__device__ __forceinline__ void copy_rows(Panels<ROWS, COLS> panels, const T* base, i64 stride, int first, int count, int cols,
                                          bool aligned) {
    constexpr int CHUNKS = COLS / 8, STRIDE = COPIERS / CHUNKS;
    const int c = threadIdx.x % CHUNKS;
#pragma unroll 2
    for (int r = threadIdx.x / CHUNKS; r < ROWS; r += STRIDE) {
        const T* from = base + (first + r) * stride + c * 8;
        unsigned char* to = panels.chunk(r, c);
        if (aligned && first + r < count && c * 8 < cols) {
            dev::copy_async16(to, from);
            continue;
        }
        Bytes16 chunk{};
        if (!aligned && first + r < count) {
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (c * 8 + e < cols) chunk.x[e / 2] |= (u32)from[e].bits << e % 2 * 16;
        }
        dev::store_for_wgmma(to, chunk);
    }
}

// Zero the inf and NaN in what this thread itself copied. True when there were some.
template <int ROWS, int COLS> __device__ __forceinline__ bool clean_rows(Panels<ROWS, COLS> panels) {
    constexpr int CHUNKS = COLS / 8, STRIDE = COPIERS / CHUNKS;
    bool found = false;
#pragma unroll 1
    for (int r = threadIdx.x / CHUNKS; r < ROWS; r += STRIDE) {
        unsigned char* at = panels.chunk(r, threadIdx.x % CHUNKS);
        Bytes16 chunk = *(const Bytes16*)at;
        if (all_finite<T>(chunk)) continue;
        found = true;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const u32 shift = e % 2 * 16;
            if (!is_finite(to_acc(T{(u16)(chunk.x[e / 2] >> shift)}))) chunk.x[e / 2] &= ~(0xffffu << shift);
        }
        dev::store_for_wgmma(at, chunk);
    }
    return found;
}

__device__ __forceinline__ void copy_everything(const Params& p, Shared shared, const Block& block) {
    const T* const q = (const T*)p.q + block.b * p.q_stride[0] + block.h * p.q_stride[1];
    const T* const k = (const T*)p.k + block.b * p.k_stride[0] + block.g * p.k_stride[1];
    const T* const v = (const T*)p.v + block.b * p.v_stride[0] + block.g * p.v_stride[1];
    Walk<true> walk(p);
    walk.begin(list_of(p, block.b, block.h), block.row0 / p.tile_q);
    Step step, next;
    bool more = walk.next(step);
    if (!more) return;
    copy_rows(shared.q(), q, p.q_stride[2], block.row0, p.len_q, p.head_dim, p.aligned_qk);
    copy_rows(shared.k(0), k, p.k_stride[2], step.start, p.len_k, p.head_dim, p.aligned_qk);
    dev::copy_async_wait_all();
    dev::fence_for_wgmma();
    dev::mbarrier_arrive(shared.full(0));  // q and pair 0
    for (int n = 0; more; ++n) {
        const bool again = walk.next(next);
        // The last pair, which has no keys, waits too: nobody may arrive at `full` again before it was waited for.
        if (n + 1 >= STAGES) dev::mbarrier_wait(shared.k_empty(n + 1), parity(n + 1 - STAGES));
        if (again) copy_rows(shared.k(n + 1), k, p.k_stride[2], next.start, p.len_k, p.head_dim, p.aligned_qk);
        if (n >= STAGES) dev::mbarrier_wait(shared.v_empty(n), parity(n - STAGES));
        copy_rows(shared.v(n), v, p.v_stride[2], step.start, p.len_k, p.head_dim_v, p.aligned_v);
        dev::copy_async_wait_all();
        if (may_hold_masked(p, step) && clean_rows(shared.v(n))) *shared.unclean(n) = n + 1;
        dev::fence_for_wgmma();
        dev::mbarrier_arrive(shared.full(n + 1));  // pair n + 1
        step = next, more = again;
    }
}

// ============================================================================================= the multipliers

// s = (rows first_row ..) of q, times k n transposed; begun, not waited for.
__device__ __forceinline__ void begin_logits(Acc (&s)[STEP / 8][4], Shared shared, int first_row, int n) {
    const u64 q = dev::matrix_at(shared.q().base + first_row * 128, QueryPanels::PANEL_BYTES);
    const u64 k = dev::matrix_at(shared.k(n).base, KeyPanels::PANEL_BYTES);
#pragma unroll
    for (int c = 0; c < HEAD_DIM; c += 16) {
        const int inside = c % PANEL * 2;
        dev::wgmma_rows<IS_F16, STEP>(s, dev::matrix_plus(q, c / PANEL * QueryPanels::PANEL_BYTES + inside),
                                      dev::matrix_plus(k, c / PANEL * KeyPanels::PANEL_BYTES + inside), c > 0);
    }
    dev::wgmma_commit();
}

// acc += weights times v n; begun, not waited for.
__device__ __forceinline__ void begin_output(Acc (&acc)[OUT_COLS / 8][4], const M::A (&weights)[STEP / 16], Shared shared, int n) {
    const u64 v = dev::matrix_at(shared.v(n).base, ValuePanels::PANEL_BYTES);
#pragma unroll
    for (int j = 0; j < STEP / 16; ++j)
        dev::wgmma_into<IS_F16, OUT_COLS>(acc, weights[j].x, dev::matrix_plus(v, j * 16 * 128), true);
    dev::wgmma_commit();
}

__device__ __forceinline__ void multiply_everything(const Params& p, Shared shared, const Block& block) {
    const int warp = threadIdx.x / 32 - COPIERS / 32, lane = threadIdx.x & 31, half = warp / 4, first_row = half * 64;
    const Rows rows{block.b, block.h, block.row0 + warp * 16 + lane / 4, p.len_q};
    Acc m[2], l[2], acc[1][OUT_COLS / 8][4], s[1][STEP / 8][4], shrink[2];
    M::A weights[STEP / 16];
    begin_rows(p, rows, m, l, acc);
    const auto softmax = [&](const Step& step) {
        const auto keep = [&](int r, Acc factor) { shrink[r] = factor; };
        if (may_hold_masked(p, step)) online_softmax<true>(p, step, rows, s, m, l, keep);
        else online_softmax<HAS_BIAS>(p, step, rows, s, m, l, keep);
    };
    const auto round_weights = [&]() {
#pragma unroll
        for (int j = 0; j < STEP / 16; ++j) M::from_c(weights[j], s[0], j);
    };
    const auto release = [&](u64* empty) {  // this warp is done with the tile
        if (lane == 0) dev::mbarrier_arrive(empty);
    };
    // v n is there, and the weights of its step are still in s: what the copier took out of v is added by hand.
    const auto add_unclean = [&](int n, const Step& step) {
        if (!may_hold_masked(p, step) || *shared.unclean(n) != n + 1) return;
        const auto value_row = [&](int r) {
            return (const T*)p.v + block.b * p.v_stride[0] + block.g * p.v_stride[1] + (step.start + r) * p.v_stride[2];
        };
        const auto is_bad = [&](int r) {
            bool found = false;
            for (int d = lane; d < p.head_dim_v && step.start + r < p.len_k; d += 32) found |= !is_finite(to_acc(value_row(r)[d]));
            return __any_sync(WARP_ALL, found) != 0;
        };
        add_bad_rows_if(acc, s, is_bad, 0, p.head_dim_v, value_row);
    };

    Walk<true> walk(p);
    walk.begin(list_of(p, block.b, block.h), block.row0 / p.tile_q);
    Step step, next;
    if (walk.next(step)) {
        dev::mbarrier_wait(shared.full(0), 0);  // q and pair 0
        dev::wgmma_fence();
        begin_logits(s[0], shared, first_row, 0);
        dev::wgmma_wait<0>();  // s of step 0
        release(shared.k_empty(0));
        softmax(step);
        round_weights();
        if (half == 1) dev::named_barrier_arrive(1, 256);  // the first turn is that of the first multiplier
        int n = 1;
        for (; walk.next(next); ++n) {
            dev::mbarrier_wait(shared.full(n), parity(n));
            add_unclean(n - 1, step);
            dev::named_barrier_sync(1 + half, 256);    // this one's turn
            dev::wgmma_fence();
            begin_logits(s[0], shared, first_row, n);
            begin_output(acc[0], weights, shared, n - 1);
            dev::named_barrier_arrive(2 - half, 256);  // the other's
            dev::wgmma_wait<1>();  // s of step n
            release(shared.k_empty(n));
            softmax(next);
            dev::wgmma_wait<0>();  // acc up to step n - 1
            release(shared.v_empty(n - 1));
#pragma unroll
            for (int r = 0; r < 2; ++r) multiply_row(acc, r, shrink[r]);
            round_weights();
            step = next;
        }
        if (half == 0) dev::named_barrier_sync(1, 256);  // the other's last arrival
        dev::mbarrier_wait(shared.full(n), parity(n));   // the last pair, which has no keys
        add_unclean(n - 1, step);
        dev::wgmma_fence();
        begin_output(acc[0], weights, shared, n - 1);
        dev::wgmma_wait<0>();  // acc
    }
    write_rows(p, rows, 0, 0, m, l, acc);
}

extern "C" __global__ void __launch_bounds__(THREADS + COPIERS, 1) attention_forward_wgmma(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(bytes);
    const Shared shared{bytes};
    if (threadIdx.x < STAGES) {
        const int n = threadIdx.x;
        dev::mbarrier_init(shared.full(n), COPIERS);
        dev::mbarrier_init(shared.k_empty(n), MULTIPLIER_WARPS), dev::mbarrier_init(shared.v_empty(n), MULTIPLIER_WARPS);
        *shared.unclean(n) = 0;
    }
    __syncthreads();  // the barriers are set up

    const int num_blocks = (p.len_q + BLOCK - 1) / BLOCK, x = blockIdx.x, head = x / num_blocks;
    Block block;
    block.row0 = (num_blocks - 1 - x % num_blocks) * BLOCK;  // the last first: under a causal mask the longest
    block.h = head % p.heads_q, block.b = head / p.heads_q, block.g = block.h / (p.heads_q / p.heads_kv);
    if (threadIdx.x < COPIERS) {
        dev::fewer_registers<40>();
        copy_everything(p, shared, block);
    } else {
        dev::more_registers<232>();
        multiply_everything(p, shared, block);
    }
}
