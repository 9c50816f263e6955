// hopper.cuh: what only sm_90a has: products of a warpgroup from shared memory (wgmma), barriers in shared memory that
// count arrivals (mbarrier), and registers that warps hand to each other.
//
// Beside device.cuh, and like it the only place with PTX; tests/cuda_host/hopper_host.h gives the same names as C++.
//
// A *matrix in panels* is rows of 64 16-bit numbers, 128 bytes, one after another; a wider matrix is several such panels,
// one behind the other. Within a row the eight chunks of 16 bytes are permuted: chunk c of row r lies at place c ^ r % 8,
// so that the same chunk of eight rows lies in eight different banks. Every panel starts at a multiple of 1024 bytes.

constexpr int PANEL = 64;  // columns of a panel

// Rows of COLS numbers in panels.
template <int ROWS, int COLS> struct Panels {
    static constexpr int CHUNKS = COLS / 8, BYTES = ROWS * COLS * 2, PANEL_BYTES = ROWS * 128;
    unsigned char* base;
    __device__ __forceinline__ unsigned char* chunk(int r, int c) const {
        return base + c / 8 * PANEL_BYTES + r * 128 + ((c % 8 ^ r % 8) << 4);
    }
};

struct alignas(64) TensorMap { u64 opaque[16]; };  // an array of four axes and a box in it, as the driver describes them

#ifndef CUDA_HOST_SHIM
namespace dev {

// ---- mbarrier: 8 bytes of shared memory; a phase ends when `count` threads have arrived and all bytes that were
// expected have come, then the next begins
__device__ __forceinline__ void mbarrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
// Until the phase of this parity (0 for the first, 1, 0, ...) is over.
__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
    asm volatile("{\n.reg .pred over;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
                 "@!over bra again;\n}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

__device__ __forceinline__ void mbarrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Behind mbarrier_init, for those that only copies know.
__device__ __forceinline__ void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// ---- TMA: a box of an array becomes one panel; its bytes are counted by the barrier ---------------------------------
__device__ __forceinline__ void copy_box(void* shared, const TensorMap& map, u64* barrier, int col, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 :: "r"(shared_address(shared)), "l"(&map), "r"(col), "r"(row), "r"(head), "r"(batch),
                    "r"(shared_address(barrier)) : "memory");
}

// ---- named barriers: some threads wait, others only arrive -----------------------------------------------------------
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// ---- registers of this warpgroup from now on ---------------------------------------------------------------------------
template <int N> __device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N));
}
template <int N> __device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N));
}

// What this thread has written to shared memory becomes visible to wgmma (of threads that then synchronise with it).
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void store_for_wgmma(void* shared, const Bytes16& chunk) { *(Bytes16*)shared = chunk; }

// ---- wgmma ---------------------------------------------------------------------------------------------------------------
// A matrix in panels, as the instruction wants it described: address, distance between panels (where one instruction
// reaches beyond a panel, else 1), distance between groups of eight rows, and 1 for the permutation within 128 bytes; all
// in units of 16 bytes.
__device__ __forceinline__ u64 matrix_at(const void* shared, int panel_bytes = 16) {
    const u64 address = shared_address(shared) >> 4, panel = panel_bytes >> 4, eight_rows = 1024 >> 4;
    return address | panel << 16 | eight_rows << 32 | (u64)1 << 62;
}
__device__ __forceinline__ u64 matrix_plus(u64 matrix, int bytes) { return matrix + (bytes >> 4); }

// Before the first product, and after registers that one reads or writes were touched.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// d (64, N) = or += a (64, 16) b (16, N), by the four warps of a warpgroup; warp w has rows 16 w .. of d and a, each as
// for mma.sync. The product is not there before the wait.
//   wgmma_rows   a and b from shared memory, a row of the matrix is a row of a, or a column of b
//   wgmma_into   a from registers; a row of the matrix is a row of b
#define NPATTN_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define NPATTN_D32(i)                                                                                             \
    NPATTN_D4(i), NPATTN_D4(i + 1), NPATTN_D4(i + 2), NPATTN_D4(i + 3), NPATTN_D4(i + 4), NPATTN_D4(i + 5),       \
        NPATTN_D4(i + 6), NPATTN_D4(i + 7)
#define NPATTN_NAMES_64                                                                                           \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
    "%29,%30,%31}"
#define NPATTN_NAMES_128                                                                                          \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
    "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,"    \
    "%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define NPATTN_ROWS(n, type, registers, a, b, keep)                                                               \
    asm volatile("{\n.reg .pred sum;\nsetp.ne.b32 sum, " keep ", 0;\n"                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " NPATTN_NAMES_##n              \
                 ", " a ", " b ", sum, 1, 1, 0, 0;\n}" : registers : "l"(ma), "l"(mb), "r"((int)is_sum))
#define NPATTN_INTO(n, type, registers, a, b, keep)                                                               \
    asm volatile("{\n.reg .pred sum;\nsetp.ne.b32 sum, " keep ", 0;\n"                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " NPATTN_NAMES_##n              \
                 ", " a ", " b ", sum, 1, 1, 1;\n}" : registers                                                    \
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "l"(mb), "r"((int)is_sum))
#define NPATTN_D64 NPATTN_D32(0)
#define NPATTN_D128 NPATTN_D32(0), NPATTN_D32(8)
#define NPATTN_CHOOSE(what, a64, b64, keep64, a128, b128, keep128)                                                 \
    static_assert(N == 64 || N == 128, "the accumulator has 64 or 128 columns");                                   \
    if constexpr (N == 64 && IS_F16) what(64, "f16", NPATTN_D64, a64, b64, keep64);                                \
    else if constexpr (N == 64) what(64, "bf16", NPATTN_D64, a64, b64, keep64);                                    \
    else if constexpr (IS_F16) what(128, "f16", NPATTN_D128, a128, b128, keep128);                                 \
    else what(128, "bf16", NPATTN_D128, a128, b128, keep128)

template <bool IS_F16, int N>
__device__ __forceinline__ void wgmma_rows(float (&d)[N / 8][4], u64 ma, u64 mb, bool is_sum) {
    NPATTN_CHOOSE(NPATTN_ROWS, "%32", "%33", "%34", "%64", "%65", "%66");
}
template <bool IS_F16, int N>
__device__ __forceinline__ void wgmma_into(float (&d)[N / 8][4], const u32 (&ra)[4], u64 mb, bool is_sum) {
    NPATTN_CHOOSE(NPATTN_INTO, "{%32,%33,%34,%35}", "%36", "%37", "{%64,%65,%66,%67}", "%68", "%69");
}
#undef NPATTN_CHOOSE
#undef NPATTN_INTO
#undef NPATTN_ROWS

}  // namespace dev
#endif
