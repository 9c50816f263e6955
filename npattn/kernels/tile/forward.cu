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
    begin_rows(p, rows, m, l, acc);
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
        const auto rescale = [&](int r, Acc factor) { multiply_row(acc, r, factor); };
        if (guarded) online_softmax<true>(p, step, rows, s, m, l, rescale);
        else online_softmax<HAS_BIAS>(p, step, rows, s, m, l, rescale);
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

    write_rows(p, rows, part, col0, m, l, acc);
}
