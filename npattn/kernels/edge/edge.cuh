// edge.cuh: attention along the edges of a graph, what its kernels share. See contract.py for the formulas.
//
// A warp takes one *item*: a node with its edges, or a part of a hub's edges. The warp's lanes are cut into groups of
// LANES, one group a head, so that the row of a node (all heads) is read together; nothing with an edge axis and a
// feature axis exists. Macros written in front by cuda_launch.py:
//   T, SCORE (DOT, ADDITIVE, DYNAMIC), LANES (1 .. 32), PER_LANE, PER_LANE_V (elements of a row a lane holds),
//   HAS_BIAS, HAS_SOFTCAP, HAS_DROPOUT, HAS_FEATURES

#define DOT 0
#define ADDITIVE 1
#define DYNAMIC 2

struct Params {
    const void* q;      // (num_targets, heads, head_dim)
    const void* k;      // (num_sources, heads, head_dim)
    const void* v;      // (num_sources, heads, head_dim_v)
    const void* bias;   // (num_edges, heads or 1) accumulation dtype, caller's edge order, or null
    const void* att;    // (heads, head_dim) accumulation dtype
    const void* features;  // (num_edges, edge_dim) accumulation dtype
    const void* weight;    // (edge_dim, heads, head_dim) accumulation dtype
    void* out;          // (num_targets, heads, head_dim_v), C order like all that follow
    void* m;            // (num_targets, heads) accumulation dtype
    void* l;
    void* p;            // (num_edges, heads) accumulation dtype, caller's edge order
    const void* dout;
    void* delta;        // (num_targets, heads) accumulation dtype
    void* dq;
    void* dk;
    void* dv;
    void* dbias;        // (num_edges, heads) accumulation dtype
    void* datt;         // (warps, heads, head_dim) accumulation dtype: one part a warp
    void* dfeatures;    // (head groups, num_edges, edge_dim) accumulation dtype: one part a group of heads
    void* dweight;      // (warps, edge_dim, heads, head_dim) accumulation dtype
    void* part_out;     // (parts, heads, widest row) accumulation dtype: unnormalised out, or dq, or dk
    void* part_v;       // the same for dv
    void* part_m;       // (parts, heads)
    void* part_l;
    const i64* begin;   // the items: first slot (or place), one behind the last, node, and where the result goes:
    const i64* end;     //   -1: to the node itself; else the number of the part
    const int* node;
    const int* part;
    const int* hub_node;   // hubs: their node and their first part; parts of hub h are hub_part[h] .. hub_part[h + 1]
    const int* hub_part;
    const int* row_source;
    const i64* row_edge;
    const int* col_target;
    const i64* col_slot;
    i64 num_edges;
    i64 q_stride[2];    // node, head, in elements
    i64 k_stride[2];
    i64 v_stride[2];
    i64 out_stride[2];
    i64 dout_stride[2];
    i64 bias_stride[2];
    double scale;
    double softcap;
    double negative_slope;
    double keep_scale;
    int num_items;
    int num_hubs;
    int num_warps;      // that share the items of the backward pass by receiving node
    int num_targets;
    int heads;
    int head_dim;
    int head_dim_v;
    int edge_dim;
    int aligned;        // rows of q, k, v, dout can be read 16 bytes at a time
    u32 drop_threshold;
    u32 seed_lo;
    u32 seed_hi;
};

template <class E> struct AccOf { using type = float; };
template <> struct AccOf<double> { using type = double; };
using Acc = AccOf<T>::type;

constexpr int WARPS = 4, THREADS = 32 * WARPS, HEADS_A_WARP = 32 / LANES;

__device__ __forceinline__ Acc exp_of(Acc x) { return exp_for<T>(x); }
__device__ __forceinline__ Acc unit() { return (Acc)UNIT<T>; }
__device__ __forceinline__ Acc minus_infinity() { return (Acc)__uint_as_float(0xff800000u); }
__device__ __forceinline__ Acc leaky(const Params& p, Acc x) { return x > Acc(0) ? x : x * (Acc)p.negative_slope; }
__device__ __forceinline__ Acc slope_of(const Params& p, Acc x) { return x > Acc(0) ? Acc(1) : (Acc)p.negative_slope; }
__device__ __forceinline__ Acc scale_before(const Params& p) { return fabs(p.scale) <= 1.0 ? (Acc)p.scale : Acc(1); }
__device__ __forceinline__ Acc scale_after(const Params& p) { return fabs(p.scale) <= 1.0 ? Acc(1) : (Acc)p.scale; }

// Sum over the lanes of a head; every one of them gets it.
__device__ __forceinline__ Acc head_sum(Acc x) {
#pragma unroll
    for (int d = 1; d < LANES; d *= 2) x += __shfl_xor_sync(WARP_ALL, x, d);
    return x;
}

struct Place {  // what this thread works on
    int warp, head, first, first_v;  // head; elements first .. first + PER_LANE - 1 of its rows
    bool is_real;                    // whether there is such a head; lanes without one read head 0
};
__device__ __forceinline__ Place my_place(const Params& p) {
    const int groups = (p.heads + HEADS_A_WARP - 1) / HEADS_A_WARP, lane = threadIdx.x & 31;
    const i64 warp = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const int head = (int)(warp % groups) * HEADS_A_WARP + lane / LANES;
    return {(int)(warp / groups), head < p.heads ? head : 0, lane % LANES * PER_LANE, lane % LANES * PER_LANE_V, head < p.heads};
}

// row[0 .. N-1] from `first` on, zeros behind `length`
template <int N, class E> __device__ __forceinline__ void read_row(Acc (&row)[N], const E* from, int first, int length, bool aligned) {
    constexpr int CHUNK = 16 / sizeof(E);
    if (N % CHUNK == 0 && aligned) {
#pragma unroll
        for (int c = 0; c < N; c += CHUNK) {
            struct alignas(16) { E x[CHUNK]; } chunk = {};
            if (first + c < length) *(Bytes16*)&chunk = *(const Bytes16*)(from + first + c);
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) row[c + e] = to_acc(chunk.x[e]);
        }
    } else {
#pragma unroll
        for (int c = 0; c < N; ++c) row[c] = first + c < length ? to_acc(from[first + c]) : Acc(0);
    }
}
template <int N> __device__ __forceinline__ void read_node(Acc (&row)[N], const void* base, const i64* stride, int node, int head,
                                                           int first, int length, bool aligned) {
    read_row(row, (const T*)base + node * stride[0] + head * stride[1], first, length, aligned);
}

// row += edge_features[e] @ edge_weight, this lane's part
template <int N> __device__ __forceinline__ void add_features(const Params& p, Acc (&row)[N], i64 e, int head, int first) {
    if (!HAS_FEATURES) return;
    const Acc* feature = (const Acc*)p.features + e * p.edge_dim;
    for (int f = 0; f < p.edge_dim; ++f) {
        const Acc* weight = (const Acc*)p.weight + ((i64)f * p.heads + head) * p.head_dim;
        const Acc x = feature[f];
#pragma unroll
        for (int c = 0; c < N; ++c) if (first + c < p.head_dim) row[c] += x * weight[first + c];
    }
}

// The logit of edge e from the rows of its ends, and what the backward pass wants to know: `inner` is the sum under the
// leaky ReLU of the additive score, or the logit after softcap. -inf: the edge is masked.
__device__ __forceinline__ Acc logit_of(const Params& p, const Acc (&q)[PER_LANE], const Acc (&k)[PER_LANE],
                                        const Acc (&att)[PER_LANE], i64 e, int head, Acc& inner) {
    Acc bias = 0, x = 0;
    if (HAS_BIAS) bias = ((const Acc*)p.bias)[e * p.bias_stride[0] + head * p.bias_stride[1]];
    if (SCORE == ADDITIVE) {
        inner = q[0] + k[0] + bias;
        x = leaky(p, inner);
    } else {
#pragma unroll
        for (int c = 0; c < PER_LANE; ++c)
            x += SCORE == DOT ? q[c] * scale_before(p) * k[c] : att[c] * leaky(p, q[c] + k[c]);
        x = head_sum(x);
        if (SCORE == DOT) x *= scale_after(p);
        if (HAS_SOFTCAP) x = (Acc)p.softcap * tanh_of(x / (Acc)p.softcap);
        inner = x;
        x += bias;
    }
    return HAS_BIAS && bias == minus_infinity() ? minus_infinity() : x;
}
__device__ __forceinline__ bool keeps(const Params& p, i64 e, int head) {
    if (!HAS_DROPOUT) return true;
    return kept(drop_row(p.seed_lo, p.seed_hi, 0, head, (u32)(e >> 32)), (u32)e, p.drop_threshold);
}
// The lanes of one head share a row; of the additive score they all hold element 0 of q and k.
__device__ __forceinline__ int first_of(const Place& at) { return SCORE == ADDITIVE ? 0 : at.first; }
