// device.cuh: everything the kernels ask of the machine, so that they need no CUDA header.
//
// The kernels are written against the names in namespace dev. Here these are inline PTX (sm_80 and newer).
// tests/cuda_host/cuda_host.h gives the same names as plain C++ (it defines CUDA_HOST_SHIM), so that g++ can run
// the very same kernel text on a CPU.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct f16 { u16 bits; };   // IEEE half
struct bf16 { u16 bits; };  // the upper half of a float

#define WARP_ALL 0xffffffffu

template <bool FIRST, class X, class Y> struct Either { using type = X; };
template <class X, class Y> struct Either<false, X, Y> { using type = Y; };
template <class X, class Y> struct Same { static constexpr bool value = false; };
template <class X> struct Same<X, X> { static constexpr bool value = true; };
struct alignas(16) Bytes16 { u32 x[4]; };

#ifndef CUDA_HOST_SHIM

#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

namespace dev {

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- conversions -------------------------------------------------------------------------------------------
__device__ __forceinline__ float f16_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ __forceinline__ float bf16_to_float(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ u32 pack_f16(float lo, float hi) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
__device__ __forceinline__ float round_tf32(float x) {  // to 10 mantissa bits, kept in a float
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
}

// A load that the compiler does not move: many of them ahead of their uses would fill the registers.
__device__ __forceinline__ f16 load_in_order(const f16* p) { return {((volatile const f16*)p)->bits}; }
__device__ __forceinline__ bf16 load_in_order(const bf16* p) { return {((volatile const bf16*)p)->bits}; }
__device__ __forceinline__ float load_in_order(const float* p) { return *(volatile const float*)p; }
__device__ __forceinline__ double load_in_order(const double* p) { return *(volatile const double*)p; }

// ---- elementary functions ----------------------------------------------------------------------------------
__device__ __forceinline__ float exp2_fast(float x) {  // 2 ulp; results below 2^-126 become 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- matrix fragments: a warp reads four 8 x 8 blocks of 16-bit numbers --------------------------------------
// Lane n gives the address of row n % 8 of block n / 8; register b of lane n holds elements (n / 4, n % 4 * 2 + {0, 1})
// of block b, or of its transpose.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

// ---- matrix products: d += a b over a whole warp -------------------------------------------------------------
// With g = lane / 4 and t = lane % 4, d holds (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of 16 x 8.
#define NPATTN_MMA_16(name, type)                                                                              \
    __device__ __forceinline__ void name(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {                 \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                             \
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                    \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                       \
    }
NPATTN_MMA_16(mma_f16, "f16")
NPATTN_MMA_16(mma_bf16, "bf16")
#undef NPATTN_MMA_16
// a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4) of 16 x 8; b: (t, g), (t + 4, g) of 8 x 8
__device__ __forceinline__ void mma_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
                   "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}
// 8 x 8 += 8 x 4 times 4 x 8; d: (g, 2t), (g, 2t + 1); a: (g, t); b: (t, g)
__device__ __forceinline__ void mma_f64(double& d0, double& d1, double a, double b) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+d"(d0), "+d"(d1) : "d"(a), "d"(b));
}

// ---- additions to memory that other blocks add to as well: to[d] += x, to[d + 1] += y, of columns below `cols` -------
__device__ __forceinline__ void add_two(float* to, int d, int cols, float x, float y) {
#if __CUDA_ARCH__ >= 900
    if (cols % 2 == 0) {  // then every pair is aligned to 8 bytes
        if (d < cols) asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" :: "l"(to + d), "f"(x), "f"(y) : "memory");
        return;
    }
#endif
    if (d < cols) atomicAdd(to + d, x);
    if (d + 1 < cols) atomicAdd(to + d + 1, y);
}

// ---- asynchronous copies: 16 bytes from global to shared memory ------------------------------------------------
__device__ __forceinline__ void copy_async16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace dev
#endif  // CUDA_HOST_SHIM

// ---- small functions for either machine ------------------------------------------------------------------------
__device__ __forceinline__ float to_acc(f16 x) { return dev::f16_to_float(x.bits); }
__device__ __forceinline__ float to_acc(bf16 x) { return dev::bf16_to_float(x.bits); }
__device__ __forceinline__ float to_acc(float x) { return x; }
__device__ __forceinline__ double to_acc(double x) { return x; }

__device__ __forceinline__ void store(f16* p, float x) { p->bits = (u16)dev::pack_f16(x, 0.f); }
__device__ __forceinline__ void store(bf16* p, float x) { p->bits = (u16)dev::pack_bf16(x, 0.f); }
__device__ __forceinline__ void store(float* p, float x) { *p = x; }
__device__ __forceinline__ void store(double* p, double x) { *p = x; }

// exp for numbers of type E, computed in float or double. x * log2(e) is rounded, and |x| times that rounding is the
// relative error: right for 16-bit E, while float32 wants the rounding back.
template <class E> __device__ __forceinline__ double exp_for(double x) { return exp(x); }
template <class E> __device__ __forceinline__ float exp_for(float x) {
    if (sizeof(E) == 2) return dev::exp2_fast(x * 1.4426950408889634f);
    x = x < -200.f ? -200.f : x;  // -inf - -inf would be NaN below; a NaN stays one
    const float y = x * 1.4426950408889634f, e = dev::exp2_fast(y);
    const float lost = fmaf(x, 1.4426950408889634f, -y) + x * 1.925963033500e-8f;  // of the exact x * log2(e)
    return fmaf(e, lost * 0.6931471805599453f, e);
}
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

// The running sums of a softmax are kept times UNIT, so that many equal weights times values near the end of the range
// do not overflow before they are divided by their sum. float16 needs none: its values are small for a float.
template <class E> constexpr double UNIT = Same<E, f16>::value ? 1.0 : 1.0 / (1 << 24);
template <class E, class Acc> __device__ __forceinline__ Acc weight_for(Acc x) {  // exp(x) * UNIT
    if (Same<E, bf16>::value) return dev::exp2_fast(fmaf((float)x, 1.4426950408889634f, -24.f));
    return exp_for<E>(x) * (Acc)UNIT<E>;
}

// Sum and maximum over the warp (every lane gets it), and over the four lanes of a quad that share a row.
template <class Acc> __device__ __forceinline__ Acc warp_sum(Acc x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(WARP_ALL, x, d);
    return x;
}
template <class Acc> __device__ __forceinline__ Acc warp_max(Acc x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x = larger(x, __shfl_xor_sync(WARP_ALL, x, d));
    return x;
}
template <class Acc> __device__ __forceinline__ Acc quad_sum(Acc x) {
    x += __shfl_xor_sync(WARP_ALL, x, 1);
    return x + __shfl_xor_sync(WARP_ALL, x, 2);
}
template <class Acc> __device__ __forceinline__ Acc quad_max(Acc x) {
    x = larger(x, __shfl_xor_sync(WARP_ALL, x, 1));
    return larger(x, __shfl_xor_sync(WARP_ALL, x, 2));
}

// ---- dropout: the generator of npattn/functional/dropout.py -----------------------------------------------------
__device__ __forceinline__ u32 drop_mix(u32 x) {
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0xd35a2d97u;
    return x ^ x >> 15;
}
__device__ __forceinline__ u32 drop_fold(u32 state, u32 word) { return drop_mix(state ^ word * 0x9e3779b1u); }
struct DropRow { u32 r0, r1; };  // the two words of one query row
__device__ __forceinline__ DropRow drop_row(u32 seed_lo, u32 seed_hi, u32 b, u32 h, u32 i) {
    DropRow row = {0x243f6a88u, 0x85a308d3u};
    const u32 words[5] = {seed_lo, seed_hi, b, h, i};
#pragma unroll
    for (int w = 0; w < 5; ++w) row.r0 = drop_fold(row.r0, words[w]), row.r1 = drop_fold(row.r1, words[w]);
    return row;
}
__device__ __forceinline__ bool kept(DropRow row, u32 j, u32 threshold) {
    return drop_mix(drop_fold(row.r0, j) ^ row.r1) >= threshold;
}
