// gpu_probes.cu: each wrapper of device.cuh alone, one warp each, so that a wrong one is known by name.

struct Params {
    const void* a;
    const void* b;
    void* d;
};

extern "C" __global__ void probe_mma_f16(const __grid_constant__ Params p) {  // a (16, 16), b (16, 8) -> d (16, 8)
    const u16 *a = (const u16*)p.a, *b = (const u16*)p.b;
    const int g = threadIdx.x >> 2, t = threadIdx.x & 3;
    u32 x[4], y[2];
    for (int r = 0; r < 4; ++r) {
        const u16* at = a + (g + (r & 1) * 8) * 16 + 2 * t + (r >> 1) * 8;
        x[r] = at[0] | (u32)at[1] << 16;
    }
    for (int r = 0; r < 2; ++r) y[r] = b[(2 * t + r * 8) * 8 + g] | (u32)b[(2 * t + r * 8 + 1) * 8 + g] << 16;
    float d[4] = {0, 0, 0, 0};
    IS_BF16 ? dev::mma_bf16(d, x, y) : dev::mma_f16(d, x, y);
    for (int e = 0; e < 4; ++e) ((float*)p.d)[(g + (e >> 1) * 8) * 8 + 2 * t + (e & 1)] = d[e];
}

extern "C" __global__ void probe_mma_tf32(const __grid_constant__ Params p) {  // a (16, 8), b (8, 8) -> d (16, 8)
    const float *a = (const float*)p.a, *b = (const float*)p.b;
    const int g = threadIdx.x >> 2, t = threadIdx.x & 3;
    float x[4], y[2], d[4] = {0, 0, 0, 0};
    for (int r = 0; r < 4; ++r) x[r] = dev::round_tf32(a[(g + (r & 1) * 8) * 8 + t + (r >> 1) * 4]);
    for (int r = 0; r < 2; ++r) y[r] = dev::round_tf32(b[(t + r * 4) * 8 + g]);
    dev::mma_tf32(d, x, y);
    for (int e = 0; e < 4; ++e) ((float*)p.d)[(g + (e >> 1) * 8) * 8 + 2 * t + (e & 1)] = d[e];
}

extern "C" __global__ void probe_mma_f64(const __grid_constant__ Params p) {  // a (8, 4), b (4, 8) -> d (8, 8)
    const double *a = (const double*)p.a, *b = (const double*)p.b;
    const int g = threadIdx.x >> 2, t = threadIdx.x & 3;
    double d0 = 0, d1 = 0;
    dev::mma_f64(d0, d1, a[g * 4 + t], b[t * 8 + g]);
    ((double*)p.d)[g * 8 + 2 * t] = d0, ((double*)p.d)[g * 8 + 2 * t + 1] = d1;
}

// a (32, 8) 16-bit: four blocks of eight rows -> d (4, 8, 8) and its transpose, by way of cp.async
extern "C" __global__ void probe_ldmatrix(const __grid_constant__ Params p) {
    DYNAMIC_SHARED(shared);
    dev::copy_async16(shared + threadIdx.x * 16, (const u16*)p.a + threadIdx.x * 8);
    dev::copy_async_wait_all();
    __syncthreads();
    u32 r[4], s[4];
    dev::ldmatrix(r, shared + threadIdx.x * 16);
    dev::ldmatrix_transposed(s, shared + threadIdx.x * 16);
    for (int block = 0; block < 4; ++block) {
        const int at = block * 64 + (threadIdx.x >> 2) * 8 + (threadIdx.x & 3) * 2;
        ((u16*)p.d)[at] = (u16)r[block], ((u16*)p.d)[at + 1] = (u16)(r[block] >> 16);
        ((u16*)p.d)[256 + at] = (u16)s[block], ((u16*)p.d)[256 + at + 1] = (u16)(s[block] >> 16);
    }
}

// a (32,) float -> d (5, 32): through f16, bf16, tf32, exp2, and f16 packed high
extern "C" __global__ void probe_convert(const __grid_constant__ Params p) {
    const float x = ((const float*)p.a)[threadIdx.x];
    float* d = (float*)p.d + threadIdx.x;
    d[0] = dev::f16_to_float((u16)dev::pack_f16(x, 0.f)), d[32] = dev::bf16_to_float((u16)dev::pack_bf16(x, 0.f));
    d[64] = dev::round_tf32(x), d[96] = dev::exp2_fast(x), d[128] = dev::f16_to_float((u16)(dev::pack_f16(0.f, x) >> 16));
}
