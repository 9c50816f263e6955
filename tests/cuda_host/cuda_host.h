// cuda_host.h: a model of one CUDA block, enough to run npattn's .cu files on a CPU.
//
//   g++ -std=c++17 -O1 -mf16c -fPIC -shared -x c++ -include cuda_host.h kernel.cu -o kernel.so
//
// Every CUDA thread is a fiber (a stack and a saved stack pointer); blocks run one after another on the calling
// thread. A fiber runs until it reaches a *meeting* (a barrier or a warp collective), parks there, and goes on when
// all participants have come; the last one to come does the work for all. What the model is strict about:
//
//   shared memory     filled with 0xff (NaN in every float format) before each block, so reading what nobody wrote
//                     shows; words behind the requested size are checked after the block
//   cp.async          lands as late as the program allows, at the wait, and in lane order of the waiting threads
//   barriers          NPATTN_CUDA_ORDER = forward | backward: one warp runs as far as it can before another starts;
//                     random:SEED: threads take turns in shuffled order; starve:A-B: threads A .. B - 1 run only when
//                     no other gets any further. A result that depends on it lacks a barrier
//   deadlock          a meeting that not all its threads reach ends the launch with a message
//   mixed collectives threads of a warp that meet at different ones end the launch
//   alignment         of cp.async and ldmatrix addresses is checked
//   sm_90a            wgmma, mbarrier, the async proxy: hopper_host.h, which is read behind this file
//
// It knows nothing of memory order, bank conflicts or speed, nor of what the PTX strings in device.cuh say.
#pragma once
#define CUDA_HOST_SHIM 1
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __restrict__
#define __grid_constant__

#ifndef __x86_64__
#error "cuda_host.h: the context switch is written for x86-64 only"
#endif

namespace host {

struct Index { unsigned x, y, z; };

[[noreturn]] inline void fail(const char* what);

struct Meeting {                        // one rendezvous; reused by the next one
    int arrived = 0;
    unsigned turn = 0;
    const void* kind = nullptr;         // what is being done together: all must have come for the same
    void* payload[32];
};
struct PendingCopy { void* to; const void* from; };
struct Fiber {
    void* stack_pointer;
    Index thread;
    int number;
    bool finished;
    std::vector<PendingCopy> copies;    // cp.async not yet waited for
    std::vector<unsigned char*> unpublished;  // 16 bytes each that wgmma does not see yet (hopper_host.h)
};

constexpr size_t STACK_BYTES = 192 << 10;
constexpr size_t FENCE_BYTES = 1024;    // behind dynamic shared memory, must stay 0xff
static std::vector<Fiber> fibers;
static std::vector<int> turn_of, place_of;      // order in which fibers get their turn, and its inverse
static std::vector<Meeting> warps;
static std::vector<char> stacks, shared, seen_by_wgmma;
static bool tracks_proxies;
static void (*at_block_start)();
static const char* (*at_thread_end)();  // why the thread should not have ended, or null
static size_t shared_bytes;
static Fiber* running;
static void* launcher_stack;
static int num_threads, num_alive;
static Meeting barrier;
static long idle_switches;              // since somebody last made progress
static bool stay_in_warp;
static int starved_from, starved_to;    // threads whose turn comes only when no other gets any further
static Index block_index, block_dim, grid_dim;
static void (*kernel)(const void*);
static const void* kernel_params;

static char message[256];               // why the last launch failed; empty: it did not

// Saves the callee-saved registers on the current stack, stores its pointer in *save, and continues on `load`.
extern "C" void host_switch(void** save, void* load) __attribute__((visibility("hidden")));
asm(".text\n.type host_switch,@function\n.hidden host_switch\n.globl host_switch\nhost_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");

// Ends the whole launch from inside a fiber: back to the launcher, which returns the message.
inline void fail(const char* what) {
    snprintf(message, sizeof message, "%s (block %u, thread %d)", what, block_index.x, running->number);
    void* abandoned;
    host_switch(&abandoned, launcher_stack);
    abort();  // not reached
}

static bool starved(int n) { return n >= starved_from && n < starved_to; }
static void run_another(bool prefer_own_warp) {
    Fiber* me = running;
    if (num_alive == 0) host_switch(&me->stack_pointer, launcher_stack);
    int place = place_of[me->number];
    int next = place;
    if (prefer_own_warp && stay_in_warp) {
        do next = (next & ~31) | ((next + 1) & 31);
        while (next != place && (next >= num_threads || fibers[turn_of[next]].finished));
    }
    const bool feeds = idle_switches > 2L * num_threads;
    if (next == place || (starved(turn_of[next]) && !feeds)) {
        bool any_other = false;
        for (int n = 0; n < num_threads && !feeds; ++n) any_other |= !fibers[n].finished && !starved(n);
        do next = next + 1 == num_threads ? 0 : next + 1;
        while (fibers[turn_of[next]].finished || (any_other && starved(turn_of[next])));
    }
    running = &fibers[turn_of[next]];
    if (running != me) host_switch(&me->stack_pointer, running->stack_pointer);
}
static void park() {
    if (++idle_switches > 64L * num_threads + 4096) fail("deadlock: a barrier or warp collective is not reached by all its threads");
    run_another(idle_switches % 96 < 64);
}
template <class Work> inline void meet(Meeting& m, int expected, int slot, void* payload, Work&& work) {
    static const char kind = 0;         // one for each type of Work
    if (m.arrived == 0) m.kind = &kind;
    if (m.kind != &kind) fail("threads of a warp meet at different collectives");
    if (slot >= 0) m.payload[slot] = payload;
    if (++m.arrived == expected) {
        work(m.payload);
        m.arrived = 0, ++m.turn, idle_switches = 0;
    } else {
        for (unsigned mine = m.turn; m.turn == mine;) park();
    }
}
template <class Work> inline void warp_meet(void* payload, Work&& work) {
    meet(warps[running->number >> 5], 32, running->number & 31, payload, work);
}

static void fiber_main() {
    kernel(kernel_params);
    if (!running->copies.empty()) fail("a thread ended with cp.async copies it never waited for");
    if (const char* why = at_thread_end()) fail(why);
    running->finished = true, --num_alive, idle_switches = 0;
    if (barrier.arrived && barrier.arrived == num_alive) barrier.arrived = 0, ++barrier.turn;  // the exited count
    run_another(true);
}
static void run_block() {
    fibers.resize(num_threads), turn_of.resize(num_threads), place_of.resize(num_threads);
    warps.assign(num_threads / 32, Meeting()), barrier = Meeting();
    stacks.resize(num_threads * STACK_BYTES);
    for (int i = 0; i < num_threads; ++i) turn_of[i] = i;
    const char* order = getenv("NPATTN_CUDA_ORDER");
    stay_in_warp = true;
    if (order && !strcmp(order, "backward")) std::reverse(turn_of.begin(), turn_of.end());
    if (order && !strncmp(order, "random:", 7)) {
        std::shuffle(turn_of.begin(), turn_of.end(), std::mt19937(atoi(order + 7) + block_index.x));
        stay_in_warp = false;
    }
    starved_from = starved_to = 0;
    if (order && !strncmp(order, "starve:", 7)) sscanf(order + 7, "%d-%d", &starved_from, &starved_to);
    for (int i = 0; i < num_threads; ++i) place_of[turn_of[i]] = i;
    memset(shared.data(), 0xff, shared.size()), memset(seen_by_wgmma.data(), 0xff, seen_by_wgmma.size());
    tracks_proxies = false, at_block_start();
    for (int i = 0; i < num_threads; ++i) {
        void** top = (void**)((uintptr_t)(stacks.data() + (i + 1) * STACK_BYTES) & ~(uintptr_t)63);
        *--top = nullptr, *--top = (void*)fiber_main, top -= 6;  // return address, then six saved registers
        memset(top, 0, 48);
        fibers[i].stack_pointer = top, fibers[i].number = i, fibers[i].finished = false, fibers[i].copies.clear();
        fibers[i].unpublished.clear();
        fibers[i].thread = {i % block_dim.x, i / block_dim.x % block_dim.y, i / block_dim.x / block_dim.y};
    }
    num_alive = num_threads, idle_switches = 0, running = &fibers[turn_of[0]];
    host_switch(&launcher_stack, running->stack_pointer);
}
inline unsigned char* dynamic_shared() { return (unsigned char*)(((uintptr_t)shared.data() + 1023) & ~(uintptr_t)1023); }
inline unsigned char* async_shared() { return (unsigned char*)seen_by_wgmma.data(); }

static const char* launch(void (*body)(const void*), const unsigned* grid, const unsigned* block, size_t bytes, const void* params) {
    message[0] = 0;
    grid_dim = {grid[0], grid[1], grid[2]}, block_dim = {block[0], block[1], block[2]};
    num_threads = block[0] * block[1] * block[2];
    if (num_threads % 32) return "the block is not a whole number of warps";
    shared_bytes = bytes, shared.assign(bytes + FENCE_BYTES + 1024, 0), seen_by_wgmma.assign(bytes, 0);
    kernel = body, kernel_params = params;
    for (unsigned z = 0; z < grid[2]; ++z) for (unsigned y = 0; y < grid[1]; ++y) for (unsigned x = 0; x < grid[0]; ++x) {
        block_index = {x, y, z};
        run_block();
        if (message[0]) return message;
        for (size_t i = 0; i < FENCE_BYTES; ++i)
            if (dynamic_shared()[shared_bytes + i] != 0xff) return "a write behind the requested shared memory";
    }
    return message;
}
template <class P> inline void call(void (*kernel)(P), const void* params) {
    std::remove_const_t<P> copy;  // the record need not be aligned as the struct is
    memcpy(&copy, params, sizeof copy);
    kernel(copy);
}
}  // namespace host

#define threadIdx (host::running->thread)
#define blockIdx (host::block_index)
#define blockDim (host::block_dim)
#define gridDim (host::grid_dim)
#define DYNAMIC_SHARED(name) unsigned char* name = host::dynamic_shared()
#define NPATTN_HOST_EXPORT(name)                                                                                  \
    extern "C" const char* name##__host(const unsigned* g, const unsigned* b, size_t s, const void* p) {           \
        return host::launch([](const void* q) { host::call(name, q); }, g, b, s, p);                                       \
    }

// ---- barriers and warp collectives --------------------------------------------------------------------------------
inline void __syncthreads() { host::meet(host::barrier, host::num_alive, -1, nullptr, [](void**) {}); }
inline int __syncthreads_or(int claim) {
    static int any[2];                  // by turn: a thread may reach the next barrier before all have read this one's
    int& mine = any[host::barrier.turn & 1];
    if (host::barrier.arrived == 0) mine = 0;
    mine |= claim != 0;
    __syncthreads();
    return mine;
}
inline void __syncwarp(unsigned = 0xffffffffu) { host::warp_meet(nullptr, [](void**) {}); }
template <class X> struct HostExchange { X in, out; int lane; };
template <class X> inline X host_exchange(X v, int from_lane) {
    HostExchange<X> mine{v, v, from_lane};
    host::warp_meet(&mine, [](void** all) {
        for (int n = 0; n < 32; ++n) { auto* e = (HostExchange<X>*)all[n]; e->out = ((HostExchange<X>*)all[e->lane])->in; }
    });
    return mine.out;
}
inline int host_lane() { return host::running->number & 31; }
template <class X> inline X __shfl_xor_sync(unsigned, X v, int d) { return host_exchange(v, host_lane() ^ d); }
template <class X> inline X __shfl_sync(unsigned, X v, int lane) { return host_exchange(v, lane & 31); }
template <class X> inline X __shfl_down_sync(unsigned, X v, int d) { return host_exchange(v, std::min(host_lane() + d, 31)); }
template <class X> inline X __shfl_up_sync(unsigned, X v, int d) { return host_exchange(v, std::max(host_lane() - d, 0)); }
inline unsigned __ballot_sync(unsigned, int claim) {
    struct Vote { int claim; unsigned all; } mine{claim, 0};
    host::warp_meet(&mine, [](void** v) {
        unsigned bits = 0;
        for (int n = 0; n < 32; ++n) bits |= (unsigned)(((Vote*)v[n])->claim != 0) << n;
        for (int n = 0; n < 32; ++n) ((Vote*)v[n])->all = bits;
    });
    return mine.all;
}
inline int __any_sync(unsigned m, int claim) { return __ballot_sync(m, claim) != 0; }
inline int __all_sync(unsigned m, int claim) { return __ballot_sync(m, claim) == 0xffffffffu; }

template <class X> inline X atomicAdd(X* p, X v) { X old = *p; *p = old + v; return old; }
template <class X> inline X atomicMax(X* p, X v) { X old = *p; *p = std::max(old, v); return old; }
template <class X> inline X __ldg(const X* p) { return *p; }

inline float __uint_as_float(unsigned i) { float f; memcpy(&f, &i, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned i; memcpy(&i, &f, 4); return i; }
inline double __longlong_as_double(long long i) { double f; memcpy(&f, &i, 8); return f; }
inline long long __double_as_longlong(double f) { long long i; memcpy(&i, &f, 8); return i; }
using std::max;
using std::min;

// ---- the names of device.cuh ----------------------------------------------------------------------------------------
namespace dev {
inline float f16_to_float(uint16_t x) { _Float16 h; memcpy(&h, &x, 2); return (float)h; }
inline uint16_t float_to_f16(float x) { _Float16 h = (_Float16)x; uint16_t u; memcpy(&u, &h, 2); return u; }
inline float bf16_to_float(uint16_t x) { return __uint_as_float((unsigned)x << 16); }
inline uint16_t float_to_bf16(float x) {
    unsigned i = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (uint16_t)((i + 0x7fff + (i >> 16 & 1)) >> 16);
}
inline unsigned pack_f16(float lo, float hi) { return float_to_f16(lo) | (unsigned)float_to_f16(hi) << 16; }
inline unsigned pack_bf16(float lo, float hi) { return float_to_bf16(lo) | (unsigned)float_to_bf16(hi) << 16; }
inline float round_tf32(float x) {
    return std::isnan(x) || std::isinf(x) ? x : __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
}
template <class E> inline E load_in_order(const E* p) { return *p; }
inline float exp2_fast(float x) { float y = exp2f(x); return y < 1.17549435e-38f ? 0.f : y; }

inline void ldmatrix_model(unsigned (&r)[4], const void* row, bool transposed) {
    struct Call { const uint16_t* row; unsigned* r; bool transposed; } mine{(const uint16_t*)row, r, transposed};
    if ((uintptr_t)row & 15) host::fail("ldmatrix: a row is not aligned to 16 bytes");
    host::warp_meet(&mine, [](void** all) {
        auto at = [&](int block, int i, int j) { return (unsigned)((Call*)all[block * 8 + i])->row[j]; };
        for (int n = 0; n < 32; ++n) for (int b = 0; b < 4; ++b) {
            int i = n >> 2, j = (n & 3) * 2;
            Call& c = *(Call*)all[n];
            c.r[b] = c.transposed ? at(b, j, i) | at(b, j + 1, i) << 16 : at(b, i, j) | at(b, i, j + 1) << 16;
        }
    });
}
inline void ldmatrix(unsigned (&r)[4], const void* row) { ldmatrix_model(r, row, false); }
inline void ldmatrix_transposed(unsigned (&r)[4], const void* row) { ldmatrix_model(r, row, true); }

// One product of a warp: gather A (16 x K) and B (K x 8) from the lanes' registers, multiply, scatter.
template <int K, class Get> inline void mma_model(float* d, const void* a, const void* b, Get get) {
    struct Call { float* d; const void *a, *b; } mine{d, a, b};
    host::warp_meet(&mine, [&](void** all) {
        float A[16][K], B[K][8], C[16][8] = {};
        for (int n = 0; n < 32; ++n) get((Call*)all[n], n >> 2, n & 3, A, B);
        for (int i = 0; i < 16; ++i) for (int k = 0; k < K; ++k) for (int j = 0; j < 8; ++j) C[i][j] += A[i][k] * B[k][j];
        for (int n = 0; n < 32; ++n) for (int e = 0; e < 4; ++e)
            ((Call*)all[n])->d[e] += C[(n >> 2) + (e >> 1) * 8][(n & 3) * 2 + (e & 1)];
    });
}
template <class Convert> inline void mma16_model(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], Convert convert) {
    mma_model<16>(d, a, b, [=](auto* c, int g, int t, auto& A, auto& B) {
        for (int e = 0; e < 2; ++e) {
            for (int r = 0; r < 4; ++r) A[g + (r & 1) * 8][2 * t + e + (r >> 1) * 8] = convert((uint16_t)(((const unsigned*)c->a)[r] >> 16 * e));
            for (int r = 0; r < 2; ++r) B[2 * t + e + r * 8][g] = convert((uint16_t)(((const unsigned*)c->b)[r] >> 16 * e));
        }
    });
}
inline void mma_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { mma16_model(d, a, b, f16_to_float); }
inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { mma16_model(d, a, b, bf16_to_float); }
inline float cut_tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }  // what the unit reads
inline void mma_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    mma_model<8>(d, a, b, [](auto* c, int g, int t, auto& A, auto& B) {
        for (int r = 0; r < 4; ++r) A[g + (r & 1) * 8][t + (r >> 1) * 4] = cut_tf32(((const float*)c->a)[r]);
        for (int r = 0; r < 2; ++r) B[t + r * 4][g] = cut_tf32(((const float*)c->b)[r]);
    });
}
inline void mma_f64(double& d0, double& d1, double a, double b) {
    struct Call { double *d0, *d1, a, b; } mine{&d0, &d1, a, b};
    host::warp_meet(&mine, [](void** all) {
        for (int n = 0; n < 32; ++n) for (int k = 0; k < 4; ++k) {
            double x = ((Call*)all[(n & ~3) | k])->a;
            *((Call*)all[n])->d0 += x * ((Call*)all[(n & 3) * 8 + k])->b;
            *((Call*)all[n])->d1 += x * ((Call*)all[(n & 3) * 8 + 4 + k])->b;
        }
    });
}

inline void add_two(float* to, int d, int cols, float x, float y) {
    if (d < cols) to[d] += x;
    if (d + 1 < cols) to[d + 1] += y;
}

inline void copy_async16(void* to, const void* from) {
    if (((uintptr_t)to | (uintptr_t)from) & 15) host::fail("cp.async: an address is not aligned to 16 bytes");
    if ((unsigned char*)to < host::dynamic_shared() || (unsigned char*)to + 16 > host::dynamic_shared() + host::shared_bytes)
        host::fail("cp.async: the target is outside shared memory");
    host::running->copies.push_back({to, from});
}
inline void copy_async_wait_all() {
    for (auto& c : host::running->copies) {
        memcpy(c.to, c.from, 16);
        if (host::tracks_proxies) host::running->unpublished.push_back((unsigned char*)c.to);
    }
    host::running->copies.clear();
}
}  // namespace dev
