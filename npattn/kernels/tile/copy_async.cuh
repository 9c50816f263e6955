// copy_async.cuh: the copier of forward_wgmma.cu by cp.async; arrays may have any strides.
//
// All its threads copy, 16 bytes at a time, wait for their own copies, and arrive at `full`.

constexpr int FULL_ARRIVALS = COPIERS, COPIER_REGISTERS = 40, MULTIPLIER_REGISTERS = 232;

using Arguments = Params;
__device__ __forceinline__ const Params& params_in(const Arguments& a) { return a; }

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
