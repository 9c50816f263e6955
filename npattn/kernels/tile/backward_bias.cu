// backward_bias.cu: dbias, summed over the axes along which the bias was broadcast.
//
// A block owns BLOCK x STEP entries of dbias (all queries of a broadcast query axis, all keys of a broadcast key axis)
// and visits every (batch, head, query, key) that reads them, in a fixed order: s and dp are computed once more, ds is
// summed in registers, written once. Places that no tile of the plan covers get 0.

// The kind of tile (row, col) in the plan, and its bitmap; false where it is in no span.
__device__ __forceinline__ bool find_tile(const Params& p, int list, int row, int col, Step& step) {
    const int* ptr = p.row_ptr + (i64)list * (p.num_rows + 1) + row;
    for (int s = ptr[0]; s < ptr[1]; ++s)
        if (col >= p.row_first[s] && col < p.row_stop[s]) {
            step.kind = p.row_kind[s], step.bits = p.row_bits[s];
            return true;
        }
    return false;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_dbias(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(shared);
    const Tile<T, HEAD_DIM> sq{(T*)shared};
    const Tile<T, HEAD_DIM_V> sdo{sq.base + sq.size(BLOCK)};
    const Tile<T, HEAD_DIM> sk{sdo.base + sdo.size(BLOCK)};
    const Tile<T, HEAD_DIM_V> sv{sk.base + sk.size(STEP)};

    const int all_rows = (p.len_q + BLOCK - 1) / BLOCK, all_cols = (p.len_k + STEP - 1) / STEP;
    const bool sums_rows = p.bias_rows == 1, sums_cols = p.bias_cols == 1;
    const int num_rows = sums_rows ? 1 : all_rows, num_cols = sums_cols ? 1 : all_cols;
    int x = blockIdx.x;
    const int own_col = x % num_cols;
    x /= num_cols;
    const int own_row = x % num_rows;
    x /= num_rows;
    const int own_head = x % p.bias_heads, own_batch = x / p.bias_heads;

    const int lane = threadIdx.x & 31, first_row = threadIdx.x / 32 * 16 * FRAGS;
    Acc sum[FRAGS][STEP / 8][4];
#pragma unroll
    for (int f = 0; f < FRAGS; ++f)
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[f][n][e] = 0;

    for (int b = own_batch; b < p.batch; b += p.bias_batch)
        for (int h = own_head; h < p.heads_q; h += p.bias_heads)
            for (int row = own_row; row < all_rows; row += num_rows) {
                const int g = h / (p.heads_q / p.heads_kv), row0 = row * BLOCK, first = row0 + first_row + lane / 4;
                QueryStats stats[2 * FRAGS];
#pragma unroll
                for (int r = 0; r < 2 * FRAGS; ++r)
                    stats[r] = query_stats(p, flat_row(p, b, h, min(first + r / 2 * 16 + r % 2 * 8, p.len_q - 1)));
                bool have_rows = false;
                for (int col = own_col; col < all_cols; col += num_cols) {
                    Step step;
                    step.start = col * STEP;
                    if (!find_tile(p, list_of(p, b, h), row0 / p.tile_q, step.start / p.tile_k, step)) continue;
                    __syncthreads();  // everybody is done with the tiles of the last round
                    if (!have_rows) {
                        load_tile(sq, BLOCK, p.head_dim, p.aligned_qk, [&](int r) -> const T* {
                            return row0 + r < p.len_q ? row_in(p.q, p.q_stride, b, h, row0 + r) : nullptr; });
                        load_tile(sdo, BLOCK, p.head_dim_v, p.aligned_v, [&](int r) -> const T* {
                            return row0 + r < p.len_q ? row_in(p.dout, p.dout_stride, b, h, row0 + r) : nullptr; });
                    }
                    have_rows = true;
                    load_tile(sk, STEP, p.head_dim, p.aligned_qk, [&](int r) -> const T* {
                        return step.start + r < p.len_k ? row_in(p.k, p.k_stride, b, g, step.start + r) : nullptr; });
                    load_tile(sv, STEP, p.head_dim_v, p.aligned_v, [&](int r) -> const T* {
                        return step.start + r < p.len_k ? row_in(p.v, p.v_stride, b, g, step.start + r) : nullptr; });
                    dev::copy_async_wait_all();
                    __syncthreads();  // the tiles have landed

                    Acc s[FRAGS][STEP / 8][4], dp[FRAGS][STEP / 8][4];
                    multiply_rows(s, sq, first_row, sk, scale_before(p));
                    multiply_rows(dp, sdo, first_row, sv, Acc(1));
                    backward_rows_step<true>(p, step, b, h, first, true, Acc(1), stats, s, dp);
#pragma unroll
                    for (int r = 0; r < 2 * FRAGS; ++r) {
                        if (first + r / 2 * 16 + r % 2 * 8 >= p.len_q) continue;
#pragma unroll
                        for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
                            for (int e = 0; e < 2; ++e) sum[r / 2][n][r % 2 * 2 + e] += s[r / 2][n][r % 2 * 2 + e];
                    }
                }
            }

    // Through shared memory, so that a broadcast axis is summed in order by one thread.
    Acc* const sums = (Acc*)shared;  // (BLOCK, STEP)
    __syncthreads();  // everybody is done with the tiles
#pragma unroll
    for (int r = 0; r < 2 * FRAGS; ++r)
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                sums[(first_row + r / 2 * 16 + r % 2 * 8 + lane / 4) * STEP + n * 8 + (lane & 3) * 2 + e] = sum[r / 2][n][r % 2 * 2 + e];
    __syncthreads();  // the sums are there
    const int out_rows = sums_rows ? 1 : BLOCK, out_cols = sums_cols ? 1 : STEP;
    for (int n = threadIdx.x; n < out_rows * out_cols; n += THREADS) {
        const int r = n / out_cols, c = n % out_cols;
        const int i = sums_rows ? 0 : own_row * BLOCK + r, j = sums_cols ? 0 : own_col * STEP + c;
        if (i >= p.bias_rows || j >= p.bias_cols) continue;
        double total = 0;
        for (int rr = r; rr < (sums_rows ? BLOCK : r + 1); ++rr)
            for (int cc = c; cc < (sums_cols ? STEP : c + 1); ++cc) total += sums[rr * STEP + cc];
        ((Acc*)p.dbias)[(((i64)own_batch * p.bias_heads + own_head) * p.bias_rows + i) * p.bias_cols + j] = (Acc)total;
    }
}
