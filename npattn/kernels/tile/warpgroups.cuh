// warpgroups.cuh: how the three warpgroups of a block of forward_wgmma.cu share their work and their shared memory.
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
    __device__ __forceinline__ u64* landed() const { return barrier(3, 0); }
    // The last step whose values held inf or NaN and were cleaned, plus one.
    __device__ __forceinline__ volatile int* unclean(int n) const { return (volatile int*)(barrier(3, 0) + 1) + n % STAGES; }
};
__device__ __forceinline__ u32 parity(int n) { return n / STAGES & 1; }

struct Block {  // what a block works on
    int b, h, g, row0;
};

__device__ __forceinline__ bool may_hold_masked(const Params& p, const Step& step) {
    return HAS_BIAS || step.kind != FULL || step.start + STEP > p.len_k;
}

// Zero the inf and NaN of a tile; a copier thread has the chunks that copy_rows of copy_async.cuh gives it. True when there were some.
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
