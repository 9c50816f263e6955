// backward_dq.cuh: dq within the pass over key tiles, by atomic additions (ATOMIC_DQ 1, asked for by NPATTN_CUDA_ATOMICS=1).
//
// attention_backward_cols has ds of its keys in registers anyway; dq = ds k is one product more there, where a pass of
// its own (backward_rows.cu) must compute s and dp again: five products instead of seven. But several blocks add to the
// same row of dq, in whatever order they run, so that its last bits differ from run to run.
//
// ds lies with keys as rows, dq needs it with queries as rows: it goes through shared memory.

constexpr int DQ_ROW_PARTS = STEP / 16;                                             // 16 queries each
constexpr int DQ_COL_PARTS = WARPS > DQ_ROW_PARTS ? WARPS / DQ_ROW_PARTS : 1;       // warps beside each other
constexpr int DQ_COLS = (HEAD_DIM / 16 + DQ_COL_PARTS - 1) / DQ_COL_PARTS * 16;     // columns of a warp

// dq_sum[rows of the step] += ds^T k. `s` holds ds (times factor), keys as rows from `first_row` on. The caller has a
// barrier between this and the next call.
__device__ __forceinline__ void add_to_dq(const Params& p, const Step& step, int b, int h, int key0, int first_row,
                                          const Acc (&s)[FRAGS][STEP / 8][4], Tile<T, BLOCK> sds, Tile<T, HEAD_DIM> sk) {
    const int warp = threadIdx.x / 32, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int f = 0; f < FRAGS; ++f)
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int key = first_row + f * 16 + g + (e >> 1) * 8;
                // Behind the last key a full tile has no mask, and its weights may be anything.
                store(sds.at(n * 8 + 2 * t + (e & 1), key), key0 + key < p.len_k ? s[f][n][e] : Acc(0));
            }
    __syncthreads();  // ds is there
#pragma unroll 1
    for (int part = warp; part < DQ_ROW_PARTS * DQ_COL_PARTS; part += WARPS) {
        const int row = part % DQ_ROW_PARTS * 16, col = part / DQ_ROW_PARTS * DQ_COLS;
        if (col >= HEAD_DIM) continue;
        Acc dq[DQ_COLS / 8][4];
#pragma unroll
        for (int n = 0; n < DQ_COLS / 8; ++n) dq[n][0] = dq[n][1] = dq[n][2] = dq[n][3] = 0;
#pragma unroll
        for (int k = 0; k < BLOCK; k += M::K) {
            typename M::A x;
            M::load_a_bt(x, sds, row, k);
#pragma unroll
            for (int n = 0; n < DQ_COLS / 8; n += 2) {
                typename M::B y[2];
                M::load_bt(y, sk, k, min(col + n * 8, HEAD_DIM - 16));
                M::mma(dq[n], x, y[0]), M::mma(dq[n + 1], x, y[1]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = step.start + row + g + half * 8;
            if (i >= p.len_q) continue;
            Acc* const to = (Acc*)p.dq_sum + flat_row(p, b, h, i) * p.head_dim;
#pragma unroll
            for (int n = 0; n < DQ_COLS / 8; ++n) {
                const int d = col + n * 8 + 2 * t;
                if (d < HEAD_DIM) dev::add_two(to, d, p.head_dim, dq[n][half * 2], dq[n][half * 2 + 1]);
            }
        }
    }
}

// dq = dq_sum, undone what ds was carried with.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_dq_from_sum(const __grid_constant__ Params p) {
    const i64 n = (i64)blockIdx.x * THREADS + threadIdx.x, count = (i64)p.batch * p.heads_q * p.len_q * p.head_dim;
    if (n < count) store((T*)p.dq + n, ((const Acc*)p.dq_sum)[n] * (ds_factor(p, true) * scale_after(p)));
}
