// forward_wgmma.cu: forward.cu for sm_90a, with float16 and bfloat16 and up to 128 columns a head.
//
// The same rows, the same walk, the same softmax; other hands (warpgroups.cuh): the copier of copy_async.cuh or
// copy_tma.cuh, and here the multipliers and the block.

// ============================================================================================= the multipliers

// s = (rows first_row ..) of q, times k n transposed; begun, not waited for.
__device__ __forceinline__ void begin_logits(Acc (&s)[STEP / 8][4], Shared shared, int first_row, int n) {
    const u64 q = dev::matrix_at(shared.q().base + first_row * 128);
    const u64 k = dev::matrix_at(shared.k(n).base);
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

extern "C" __global__ void __launch_bounds__(THREADS + COPIERS, 1) attention_forward_wgmma(const __grid_constant__ Arguments arguments) {
    DYNAMIC_SHARED(bytes);
    const Params& p = params_in(arguments);
    const Shared shared{bytes};
    if (threadIdx.x < STAGES) {
        const int n = threadIdx.x;
        dev::mbarrier_init(shared.full(n), FULL_ARRIVALS);
        dev::mbarrier_init(shared.k_empty(n), MULTIPLIER_WARPS), dev::mbarrier_init(shared.v_empty(n), MULTIPLIER_WARPS);
        if (n == 0) dev::mbarrier_init(shared.landed(), 1);
        *shared.unclean(n) = 0;
        dev::mbarrier_init_fence();
    }
    __syncthreads();  // the barriers are set up

    const int num_blocks = (p.len_q + BLOCK - 1) / BLOCK, x = blockIdx.x, head = x / num_blocks;
    Block block;
    block.row0 = (num_blocks - 1 - x % num_blocks) * BLOCK;  // the last first: under a causal mask the longest
    block.h = head % p.heads_q, block.b = head / p.heads_q, block.g = block.h / (p.heads_q / p.heads_kv);
    if (threadIdx.x < COPIERS) {
        dev::fewer_registers<COPIER_REGISTERS>();
        copy_everything(arguments, shared, block);
    } else {
        dev::more_registers<MULTIPLIER_REGISTERS>();
        multiply_everything(p, shared, block);
    }
}
