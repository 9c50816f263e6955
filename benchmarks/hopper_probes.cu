// hopper_probes.cu: each wrapper of hopper.cuh alone, one warpgroup each, so that a wrong one is known by name.

struct Params {
    const void* a;
    const void* b;
    void* d;
};

constexpr bool IS_F16 = !IS_BF16;
using Wide = Panels<128, 128>;  // two panels
using Tall = Panels<64, 128>;

template <int ROWS, int COLS> __device__ __forceinline__ void fill(Panels<ROWS, COLS> to, const void* from) {
    for (int n = threadIdx.x; n < ROWS * COLS / 8; n += 128)
        dev::store_for_wgmma(to.chunk(n / (COLS / 8), n % (COLS / 8)), ((const Bytes16*)from)[n]);
    dev::fence_for_wgmma();
}
__device__ __forceinline__ void put(float* d, const float (&c)[16][4]) {  // (64, 128)
    const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16 + lane / 4;
    for (int n = 0; n < 16; ++n)
        for (int e = 0; e < 4; ++e) d[(row + (e >> 1) * 8) * 128 + n * 8 + (lane & 3) * 2 + (e & 1)] = c[n][e];
}

// a (64, 128), b (128, 128) -> d (64, 128) = a b^T, both from shared memory
extern "C" __global__ void __launch_bounds__(128) probe_wgmma_rows(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(shared);
    const Tall a{shared};
    const Wide b{shared + Tall::BYTES};
    fill(a, p.a), fill(b, p.b);
    __syncthreads();
    float c[16][4];
    dev::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 128; k += 16) {
        const int inside = k % PANEL * 2;
        dev::wgmma_rows<IS_F16, 128>(c, dev::matrix_plus(dev::matrix_at(a.base), k / PANEL * Tall::PANEL_BYTES + inside),
                                     dev::matrix_plus(dev::matrix_at(b.base), k / PANEL * Wide::PANEL_BYTES + inside), k > 0);
    }
    dev::wgmma_commit();
    dev::wgmma_wait<0>();
    put((float*)p.d, c);
}

// a (64, 128), b (128, 128) -> d (64, 128) = a b, a from registers
extern "C" __global__ void __launch_bounds__(128) probe_wgmma_into(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(shared);
    const Wide b{shared};
    fill(b, p.b);
    __syncthreads();
    const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16 + lane / 4;
    u32 a[8][4];
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            a[k][r] = *(const u32*)((const u16*)p.a + (row + (r & 1) * 8) * 128 + k * 16 + (lane & 3) * 2 + (r >> 1) * 8);
    float c[16][4] = {};
    dev::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k)
        dev::wgmma_into<IS_F16, 128>(c, a[k], dev::matrix_plus(dev::matrix_at(b.base, Wide::PANEL_BYTES), k * 16 * 128), true);
    dev::wgmma_commit();
    dev::wgmma_wait<0>();
    put((float*)p.d, c);
}

struct alignas(64) MappedParams {
    Params p;
    TensorMap map;
};
// A box of 32 rows of the array behind `map` -> d (32, 64) 16-bit, unpermuted: from column 64, row 10 of head 1, batch 2 on
extern "C" __global__ void __launch_bounds__(32) probe_tma(const __grid_constant__ MappedParams p) {
    DYNAMIC_SHARED(shared);
    u64* const landed = (u64*)(shared + 32 * 128);
    if (threadIdx.x == 0) dev::mbarrier_init(landed, 1), dev::mbarrier_init_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        dev::mbarrier_expect(landed, 32 * 128);
        dev::copy_box(shared, p.map, landed, 64, 10, 1, 2);
        dev::mbarrier_arrive(landed);
    }
    dev::mbarrier_wait(landed, 0);
    const Panels<32, 64> panel{shared};
    for (int c = 0; c < 8; ++c) ((Bytes16*)p.p.d)[threadIdx.x * 8 + c] = *(const Bytes16*)panel.chunk(threadIdx.x, c);
}

// Two of four warps hand 64 numbers on, three times through one place; registers go from some warps to others.
// a (3, 64) float -> d (3, 64)
extern "C" __global__ void __launch_bounds__(256, 1) probe_mbarrier(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(shared);
    float* const place = (float*)shared;
    u64 *const full = (u64*)(shared + 256), *const empty = full + 1;
    if (threadIdx.x == 0) dev::mbarrier_init(full, 64), dev::mbarrier_init(empty, 64);
    __syncthreads();
    if (threadIdx.x < 128) {
        dev::fewer_registers<40>();
        for (int n = 0; n < 3 && threadIdx.x < 64; ++n) {
            if (n > 0) dev::mbarrier_wait(empty, n - 1 & 1);
            place[threadIdx.x] = ((const float*)p.a)[n * 64 + threadIdx.x];
            dev::mbarrier_arrive(full);
        }
    } else {
        dev::more_registers<200>();
        for (int n = 0; n < 3 && threadIdx.x < 192; ++n) {
            dev::mbarrier_wait(full, n & 1);
            ((float*)p.d)[n * 64 + threadIdx.x - 128] = place[191 - threadIdx.x];
            dev::mbarrier_arrive(empty);
        }
        if (threadIdx.x < 192) dev::named_barrier_arrive(1, 128);
        else dev::named_barrier_sync(1, 128);
    }
}
