// hopper_host.h: the names of npattn/kernels/hopper.cuh as plain C++, behind cuda_host.h.
//
//   mbarrier          counts arrivals, bytes and phases; a wait parks until the phase of its parity is over
//   TMA               a box lands when it is asked for, or when somebody waits and nothing else is missing, by the same
//                     variable as wgmma's operands; a tensor map is what fake_cupy.tensor_map makes
//   wgmma             a product needs the 128 threads of its warpgroup, and happens where some thread waits for it. Its
//                     operands are read either as early as the program allows (all have committed it) or as late (the
//                     wait), by NPATTN_CUDA_WGMMA = early | late: results must not depend on it
//   async proxy       wgmma sees a second copy of shared memory. What a thread wrote with cp.async or store_for_wgmma
//                     gets there by its own fence_for_wgmma; everything else stays NaN
//   wgmma.fence       a product without one since the last wait ends the launch
//   matrices          only panels of 128 bytes, permuted, as hopper.cuh describes them
#pragma once
#include <deque>
#include <map>

namespace host {

struct WgmmaCall { float* d; const unsigned* a; unsigned long long ma, mb; int n; bool is_sum, is_f16; };
struct WgmmaGroup {                     // what one commit of the 128 threads of a warpgroup covers
    std::vector<WgmmaCall> calls[128];
    int committed = 0;
    bool done = false;
    std::vector<float> a, b;            // operands, where they were read early
};
struct Warpgroup { std::deque<WgmmaGroup> groups; };
struct WgmmaThread { std::vector<WgmmaCall> open; int committed = 0, waited = 0; bool fenced = false; };
struct NamedBarrier { int arrived = 0; unsigned turn = 0; };
static std::vector<Warpgroup> warpgroups;
static std::vector<WgmmaThread> wgmma_threads;
static NamedBarrier named_barriers[16];
static bool reads_early;
struct BoxMap { const char* base; uint64_t sizes[4], strides[3]; uint32_t rows; };  // sizes from the last axis on
struct Box { unsigned char* to; const BoxMap* map; int at[4]; };
struct Traffic { long bytes = 0; std::vector<Box> boxes; };  // of one barrier: expected less landed, and still on the way
static std::map<void*, Traffic> traffic;

static const char* hopper_thread_end() {
    WgmmaThread& t = wgmma_threads[running->number];
    if (!t.open.empty() || t.waited < t.committed) return "a thread ended with products it never waited for";
    return nullptr;
}
static void hopper_block_start() {
    warpgroups.assign((num_threads + 127) / 128, Warpgroup());
    wgmma_threads.assign(num_threads, WgmmaThread());
    for (auto& b : named_barriers) b = NamedBarrier();
    traffic.clear();
    const char* when = getenv("NPATTN_CUDA_WGMMA");
    reads_early = !(when && !strcmp(when, "late"));
}
static const bool hopper_is_here = (at_block_start = hopper_block_start, at_thread_end = hopper_thread_end, true);

// Element k of row r of a matrix in panels, or, where the rows run along k, element r of row k.
inline float wgmma_element(const WgmmaCall& c, unsigned long long matrix, int r, int k, bool rows_along_k) {
    const unsigned start = (matrix & 0x3fff) << 4, panel = (matrix >> 16 & 0x3fff) << 4, eight_rows = (matrix >> 32 & 0x3fff) << 4;
    if (matrix >> 62 != 1) fail("wgmma: only the permutation within 128 bytes is modelled");
    unsigned at = rows_along_k ? start + r / 64 * panel + k / 8 * eight_rows + k % 8 * 128 + r % 64 * 2
                               : start + r / 8 * eight_rows + r % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    if (at + 2 > shared_bytes) fail("wgmma: a matrix reaches outside shared memory");
    uint16_t x;
    memcpy(&x, async_shared() + at, 2);
    return c.is_f16 ? dev::f16_to_float(x) : dev::bf16_to_float(x);
}
inline float wgmma_register(const WgmmaCall& c, int r, int e) {
    const uint16_t x = (uint16_t)(c.a[r] >> 16 * e);
    return c.is_f16 ? dev::f16_to_float(x) : dev::bf16_to_float(x);
}
static void read_operands(WgmmaGroup& group) {
    for (size_t o = 0; o < group.calls[0].size(); ++o) {
        const WgmmaCall& first = group.calls[0][o];
        const size_t a = group.a.size(), b = group.b.size();
        group.a.resize(a + 64 * 16), group.b.resize(b + 16 * first.n);
        for (int k = 0; k < 16; ++k)
            for (int j = 0; j < first.n; ++j) group.b[b + k * first.n + j] = wgmma_element(first, first.mb, j, k, first.a != nullptr);
        for (int n = 0; n < 128; ++n) {
            if (group.calls[n].size() <= o) fail("wgmma: not all threads of the warpgroup take part");
            const WgmmaCall& c = group.calls[n][o];
            if (c.ma != first.ma || c.mb != first.mb || c.n != first.n || c.is_sum != first.is_sum)
                fail("wgmma: the threads of a warpgroup mean different matrices");
            const int row = n / 32 * 16 + n % 32 / 4, col = n % 4 * 2;
            for (int r = 0; r < 4 && c.a; ++r)
                for (int e = 0; e < 2; ++e) group.a[a + (row + (r & 1) * 8) * 16 + col + (r >> 1) * 8 + e] = wgmma_register(c, r, e);
        }
        for (int i = 0; i < 64 && !first.a; ++i)
            for (int k = 0; k < 16; ++k) group.a[a + i * 16 + k] = wgmma_element(first, first.ma, i, k, false);
    }
}
static void multiply_group(WgmmaGroup& group) {
    if (group.a.empty()) read_operands(group);
    const float *A = group.a.data(), *B = group.b.data();
    for (size_t o = 0; o < group.calls[0].size(); ++o) {
        const int n = group.calls[0][o].n;
        static float C[64][256];
        memset(C, 0, sizeof C);
        for (int i = 0; i < 64; ++i) for (int k = 0; k < 16; ++k) for (int j = 0; j < n; ++j) C[i][j] += A[i * 16 + k] * B[k * n + j];
        for (int thread = 0; thread < 128; ++thread) {
            const WgmmaCall& c = group.calls[thread][o];
            const int row = thread / 32 * 16 + thread % 32 / 4, col = thread % 4 * 2;
            for (int e = 0; e < n / 2; ++e) {
                const float x = C[row + (e >> 1 & 1) * 8][(e >> 2) * 8 + col + (e & 1)];
                c.d[e] = c.is_sum ? c.d[e] + x : x;
            }
        }
        A += 64 * 16, B += 16 * n;
    }
    group.done = true, group.a.clear(), group.b.clear();
    for (auto& calls : group.calls) calls.clear();
}

struct Mbarrier { uint16_t count, left; uint32_t phase; };
inline void land(const Box& box, Traffic& t) {
    const BoxMap& m = *box.map;
    for (uint32_t r = 0; r < m.rows; ++r)
        for (int c = 0; c < 64; ++c) {
            uint16_t x = 0;
            const uint64_t at[4] = {uint64_t(box.at[0] + c), uint64_t(box.at[1] + (int)r), (uint64_t)box.at[2], (uint64_t)box.at[3]};
            if (at[0] < m.sizes[0] && at[1] < m.sizes[1] && at[2] < m.sizes[2] && at[3] < m.sizes[3])
                memcpy(&x, m.base + at[0] * 2 + at[1] * m.strides[0] + at[2] * m.strides[1] + at[3] * m.strides[2], 2);
            size_t place = box.to - dynamic_shared() + r * 128 + c * 2;
            place ^= (place >> 7 & 7) << 4;
            memcpy(dynamic_shared() + place, &x, 2), memcpy(async_shared() + place, &x, 2);
        }
    t.bytes -= m.rows * 128;
}
inline Mbarrier& mbarrier_at(unsigned long long* address, bool is_new) {
    Mbarrier& b = *(Mbarrier*)address;
    if ((uintptr_t)address & 7) fail("mbarrier: not aligned to 8 bytes");
    if (!is_new && (b.count == 0xffff || b.left > b.count)) fail("mbarrier: used before it was set up");
    return b;
}
}  // namespace host

namespace dev {
using host_u64 = unsigned long long;
inline void mbarrier_init(host_u64* barrier, unsigned count) {
    host::mbarrier_at(barrier, true) = {(uint16_t)count, (uint16_t)count, 0};
    host::tracks_proxies = true;
}
inline void mbarrier_end_phase(host_u64* barrier) {  // if nothing is missing
    host::Mbarrier& b = *(host::Mbarrier*)barrier;
    if (b.left == 0 && host::traffic[barrier].bytes == 0) b.left = b.count, ++b.phase, host::idle_switches = 0;
}
inline void mbarrier_arrive(host_u64* barrier) {
    --host::mbarrier_at(barrier, false).left;
    mbarrier_end_phase(barrier);
    if (host::starved(host::running->number)) host::park();  // whoever waited goes first
}
inline void mbarrier_expect(host_u64* barrier, unsigned bytes) { host::traffic[barrier].bytes += bytes; }
inline void mbarrier_init_fence() {}
inline void mbarrier_wait(host_u64* barrier, unsigned parity) {
    while ((host::mbarrier_at(barrier, false).phase & 1) == parity) {
        host::Traffic& t = host::traffic[barrier];
        if (host::mbarrier_at(barrier, false).left == 0 && !t.boxes.empty()) {
            for (auto& box : t.boxes) host::land(box, t);
            t.boxes.clear(), mbarrier_end_phase(barrier);
            continue;
        }
        host::park();
    }
}
template <class Map> inline void copy_box(void* shared, const Map& map, host_u64* barrier, int col, int row, int head, int batch) {
    const host::Box box{(unsigned char*)shared, (const host::BoxMap*)&map, {col, row, head, batch}};
    if ((box.to - host::dynamic_shared()) % 1024) host::fail("TMA: a panel does not start at a multiple of 1024 bytes");
    if (box.to - host::dynamic_shared() + box.map->rows * 128 > host::shared_bytes) host::fail("TMA: a box reaches outside shared memory");
    host::Traffic& t = host::traffic[barrier];
    if (host::reads_early) host::land(box, t), mbarrier_end_phase(barrier);
    else t.boxes.push_back(box);
}
inline bool named_barrier_comes(int id, int threads) {
    host::NamedBarrier& b = host::named_barriers[id];
    if (++b.arrived < threads) return false;
    b.arrived = 0, ++b.turn, host::idle_switches = 0;
    return true;
}
inline void named_barrier_arrive(int id, int threads) { named_barrier_comes(id, threads); }
inline void named_barrier_sync(int id, int threads) {
    const unsigned mine = host::named_barriers[id].turn;
    if (!named_barrier_comes(id, threads)) while (host::named_barriers[id].turn == mine) host::park();
}
template <int N> inline void fewer_registers() {}
template <int N> inline void more_registers() {}

inline void fence_for_wgmma() {
    for (unsigned char* at : host::running->unpublished) memcpy(host::async_shared() + (at - host::dynamic_shared()), at, 16);
    host::running->unpublished.clear();
}
template <class Chunk> inline void store_for_wgmma(void* shared, const Chunk& chunk) {
    memcpy(shared, &chunk, 16);
    host::running->unpublished.push_back((unsigned char*)shared);
}

inline host_u64 matrix_at(const void* shared, int panel_bytes = 16) {
    const host_u64 offset = (const unsigned char*)shared - host::dynamic_shared();
    return (offset & 0x3ffff) >> 4 | (host_u64)(panel_bytes >> 4) << 16 | (host_u64)64 << 32 | (host_u64)1 << 62;
}
inline host_u64 matrix_plus(host_u64 matrix, int bytes) { return matrix + (bytes >> 4); }
inline host::WgmmaThread& wgmma_thread() { return host::wgmma_threads[host::running->number]; }
inline void wgmma_fence() { wgmma_thread().fenced = true; }
inline void wgmma_call(host::WgmmaCall call) {
    if (!wgmma_thread().fenced) host::fail("wgmma: no wgmma.fence since the last wait");
    wgmma_thread().open.push_back(call);
}
template <bool IS_F16, int N> inline void wgmma_rows(float (&d)[N / 8][4], host_u64 ma, host_u64 mb, bool is_sum) {
    wgmma_call({&d[0][0], nullptr, ma, mb, N, is_sum, IS_F16});
}
template <bool IS_F16, int N> inline void wgmma_into(float (&d)[N / 8][4], const unsigned (&ra)[4], host_u64 mb, bool is_sum) {
    wgmma_call({&d[0][0], ra, 0, mb, N, is_sum, IS_F16});
}
inline void wgmma_commit() {
    host::WgmmaThread& t = wgmma_thread();
    auto& groups = host::warpgroups[host::running->number / 128].groups;
    if ((int)groups.size() <= t.committed) groups.emplace_back();
    host::WgmmaGroup& group = groups[t.committed++];
    group.calls[host::running->number % 128].swap(t.open), t.open.clear();
    if (++group.committed == 128 && host::reads_early) host::read_operands(group);
}
template <int PENDING> inline void wgmma_wait() {
    host::WgmmaThread& t = wgmma_thread();
    auto& groups = host::warpgroups[host::running->number / 128].groups;
    for (; t.waited < t.committed - PENDING; ++t.waited) {
        while (groups[t.waited].committed < 128) host::park();
        if (!groups[t.waited].done) host::multiply_group(groups[t.waited]), host::idle_switches = 0;
    }
    t.fenced = false;
    asm volatile("" ::: "memory");
}
}  // namespace dev
