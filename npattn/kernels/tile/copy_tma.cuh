// copy_tma.cuh: the copier of forward_wgmma.cu by TMA, which copies boxes of arrays that the driver has described.
//
// One thread asks for boxes; they land in panels, permuted, with zeros behind the ends of the array, and are counted in
// bytes by `full`. Where a step may hold masked pairs its values must be cleaned first: they are counted by `landed`
// instead, and all threads of the copier look through them before `full` hears of it.

constexpr int FULL_ARRIVALS = 1, COPIER_REGISTERS = 40, MULTIPLIER_REGISTERS = 232;

struct alignas(64) Arguments {
    Params p;
    TensorMap q, k, v;
};
__device__ __forceinline__ const Params& params_in(const Arguments& a) { return a.p; }

// Rows from `row` on into all panels, counted by `barrier`.
template <int ROWS, int COLS>
__device__ __forceinline__ void copy_panels(Panels<ROWS, COLS> to, const TensorMap& map, u64* barrier, int row, int head, int batch) {
    dev::mbarrier_expect(barrier, Panels<ROWS, COLS>::BYTES);
#pragma unroll
    for (int c = 0; c < COLS; c += PANEL)
        dev::copy_box(to.base + c / PANEL * Panels<ROWS, COLS>::PANEL_BYTES, map, barrier, c, row, head, batch);
}

__device__ __forceinline__ void copy_everything(const Arguments& a, Shared shared, const Block& block) {
    const Params& p = a.p;
    const bool asks = threadIdx.x == 0;
    Walk<true> walk(p);
    walk.begin(list_of(p, block.b, block.h), block.row0 / p.tile_q);
    Step step, next;
    bool more = walk.next(step);
    if (!more) return;
    if (asks) {
        copy_panels(shared.q(), a.q, shared.full(0), block.row0, block.h, block.b);
        copy_panels(shared.k(0), a.k, shared.full(0), step.start, block.g, block.b);
        dev::mbarrier_arrive(shared.full(0));  // q and pair 0 are asked for
    }
    int landings = 0;
    for (int n = 0; more; ++n) {
        const bool again = walk.next(next), guarded = may_hold_masked(p, step);
        if (asks) {
            // The last pair, which has no keys, waits too: nobody may arrive at `full` again before it was waited for.
            if (n + 1 >= STAGES) dev::mbarrier_wait(shared.k_empty(n + 1), parity(n + 1 - STAGES));
            if (again) copy_panels(shared.k(n + 1), a.k, shared.full(n + 1), next.start, block.g, block.b);
            if (n >= STAGES) dev::mbarrier_wait(shared.v_empty(n), parity(n - STAGES));
            u64* const counted_by = guarded ? shared.landed() : shared.full(n + 1);
            copy_panels(shared.v(n), a.v, counted_by, step.start, block.g, block.b);
            dev::mbarrier_arrive(counted_by);  // pair n + 1, or its values, are asked for
        }
        if (guarded) {
            dev::mbarrier_wait(shared.landed(), landings++ & 1);  // the values of step n are there
            if (clean_rows(shared.v(n))) *shared.unclean(n) = n + 1;
            dev::fence_for_wgmma();
            __syncwarp();
            dev::named_barrier_sync(3, COPIERS);  // all of them are clean
            if (asks) dev::mbarrier_arrive(shared.full(n + 1));  // pair n + 1, as soon as its keys are there
        }
        step = next, more = again;
    }
}
