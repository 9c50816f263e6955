// tile.cuh: what the attention kernels share: their parameters, the walk over a TilePlan, the test inside a
// partial tile, tiles in shared memory, and how a warp multiplies them.
//
// Compiled once per specialisation; the launcher writes these macros in front:
//   T                          element type: f16, bf16, float or double
//   HEAD_DIM, HEAD_DIM_V       rounded up to a multiple of 16; the rest is filled with zeros
//   HAS_BIAS HAS_SOFTCAP HAS_DROPOUT PAGED   0 or 1
//   WARPS                      warps of a block (forward_wgmma.cu: those that own rows)
//   FRAGS                      16-row fragments a warp owns; a block owns BLOCK = 16 * WARPS * FRAGS rows
//   STEP                       columns (keys, or queries in the dk/dv pass) read into shared memory at a time
//   STAGES                     2: the next step is copied while this one is computed; 1: one after the other
//   OUT_COLS                   columns of out, dq, dk or dv a block owns; other blocks own the others

// One argument of every kernel, by value. launch.py reads this declaration to lay out its NumPy record.
struct Params {
    const void* q;
    const void* k;
    const void* v;
    const void* bias;   // accumulation dtype, or null
    const void* sinks;  // (heads_q,) accumulation dtype, or null
    void* out;          // (batch, heads_q, len_q, head_dim_v), C order like everything below
    void* rest;         // as out: what rounding took from it, or null
    void* m;            // (batch, heads_q, len_q) accumulation dtype
    void* l;
    const void* dout;
    const void* dlse;   // (batch, heads_q, len_q) accumulation dtype, or null
    void* delta;        // (batch, heads_q, len_q) accumulation dtype: rowsum(dout * out) - dlse
    void* absmax;       // one float: the largest |dout|, as bits
    void* dq;
    void* dq_sum;       // (batch, heads_q, len_q, head_dim) accumulation dtype, zeros before: with ATOMIC_DQ
    void* dk;
    void* dv;
    void* dbias;
    void* dsinks;
    void* part_out;     // (splits, batch, heads_q, len_q, head_dim_v) accumulation dtype: unnormalised
    void* part_m;       // (splits, batch, heads_q, len_q)
    void* part_l;
    const int* page_table;  // (batch, pages_per_sequence): page of each page_size keys
    const int* list_of;     // the plan, see npattn/plans/tiles.py
    const int* row_ptr;
    const int* row_first;
    const int* row_stop;
    const int* row_kind;
    const int* row_bits;
    const int* col_ptr;
    const int* col_first;
    const int* col_stop;
    const int* col_kind;
    const int* col_bits;
    const int* lo;
    const int* hi;
    const u32* bits;
    i64 q_stride[3];     // batch, head, row, in elements; the last axis is contiguous
    i64 k_stride[3];     // paged: page, head, row
    i64 v_stride[3];
    i64 out_stride[3];
    i64 dout_stride[3];
    i64 bias_stride[4];  // 0 along broadcast axes
    i64 part_rows;       // batch * heads_q * len_q
    double scale;
    double softcap;
    double keep_scale;   // 1 / (1 - dropout_p)
    int batch;
    int heads_q;
    int heads_kv;
    int len_q;
    int len_k;
    int head_dim;
    int head_dim_v;
    int tile_q;
    int tile_k;
    int list_batch;
    int list_heads;
    int num_rows;
    int num_cols;
    int has_intervals;   // whether lo and hi hold anything
    int aligned_qk;      // whether rows of q and k can be read 16 bytes at a time
    int aligned_v;       // the same for v, and for dout
    int num_splits;
    int page_size;
    int pages_per_sequence;
    int bias_batch;      // sizes of bias's axes, for dbias
    int bias_heads;
    int bias_rows;
    int bias_cols;
    u32 drop_threshold;
    u32 seed_lo;
    u32 seed_hi;
};

enum { FULL = 0, INTERVAL = 1, BITS = 2 };
constexpr int THREADS = 32 * WARPS;
constexpr int BLOCK = 16 * WARPS * FRAGS;

// ================================================================================================ walking a plan

__device__ __forceinline__ int list_of(const Params& p, int b, int h) {
    return p.list_of[b % p.list_batch * p.list_heads + h % p.list_heads];
}

struct Step { int start, kind, bits; };  // STEP columns from `start`, all in one tile

// Visits the tiles of one row of tiles (BY_ROW) or of one column, STEP columns (or rows) at a time.
template <bool BY_ROW> struct Walk {
    const Params& p;
    int span, last_span;  // now, and one past the last
    int tile;             // next tile; -1: the span's first
    int inside;           // offset in that tile
    int tiles_left;       // DECODE: how many tiles may still be entered

    __device__ __forceinline__ int first(int s) const { return (BY_ROW ? p.row_first : p.col_first)[s]; }
    __device__ __forceinline__ int stop(int s) const { return (BY_ROW ? p.row_stop : p.col_stop)[s]; }
    __device__ __forceinline__ Walk(const Params& params) : p(params), span(0), last_span(0) {}
    __device__ __forceinline__ void begin(int list, int row) {
        const int* ptr = (BY_ROW ? p.row_ptr : p.col_ptr) + (i64)list * ((BY_ROW ? p.num_rows : p.num_cols) + 1) + row;
        span = ptr[0], last_span = ptr[1], tile = -1, inside = 0, tiles_left = 0x7fffffff;
    }
    // Keep only part `n` of `parts` nearly equal parts of the row's tiles.
    __device__ __forceinline__ void take_part(int n, int parts) {
        int total = 0;
        for (int s = span; s < last_span; ++s) total += stop(s) - first(s);
        int skip = (int)((i64)total * n / parts);
        tiles_left = (int)((i64)total * (n + 1) / parts) - skip;
        for (; span < last_span && skip >= stop(span) - first(span); ++span) skip -= stop(span) - first(span);
        if (span < last_span) tile = first(span) + skip;
    }
    __device__ __forceinline__ bool next(Step& step) {
        const int size = BY_ROW ? p.tile_k : p.tile_q, length = BY_ROW ? p.len_k : p.len_q;
        if (span >= last_span || (DECODE && tiles_left <= 0)) return false;
        if (tile < 0) tile = first(span);
        step = {tile * size + inside, (BY_ROW ? p.row_kind : p.col_kind)[span], (BY_ROW ? p.row_bits : p.col_bits)[span]};
        inside += STEP;
        if (inside >= size || step.start + STEP >= length) {
            inside = 0, ++tile, --tiles_left;
            if (tile >= stop(span)) ++span, tile = -1;
        }
        return true;
    }
};

// ======================================================================================== tiles in shared memory

// Rows of COLS elements, each 16 bytes longer than its contents (32 for double), so that the eight rows of 16 bytes
// that a warp reads at once lie in different banks. Permuting the chunks of a row (XOR with row % 8) would do the
// same without the extra bytes, but then every k has an address of its own: the compiler keeps those in registers
// and spills; with padding they are constant offsets inside the load instruction.
template <class E, int COLS> struct Tile {
    static constexpr int CHUNK = 16 / sizeof(E);
    static constexpr int STRIDE = COLS + (sizeof(E) == 8 ? 4 : CHUNK);
    E* base;
    __device__ __forceinline__ E* at(int row, int col) const { return base + row * STRIDE + col; }
    static constexpr int size(int rows) { return rows * STRIDE; }
};

// Fill `rows` rows of a tile: row r from row_pointer(r) (null: zeros), columns [0, cols), zeros behind them.
// aligned: every row_pointer is a multiple of 16 bytes and cols one of a chunk; the copy is then asynchronous.
template <class E, int COLS, class RowPointer>
__device__ __forceinline__ void load_tile(Tile<E, COLS> tile, int rows, int cols, bool aligned, RowPointer row_pointer) {
    constexpr int CHUNK = Tile<E, COLS>::CHUNK, CHUNKS = COLS / CHUNK;
#pragma unroll 1
    for (int n = threadIdx.x; n < rows * CHUNKS; n += THREADS) {
        const int r = n / CHUNKS, c = n % CHUNKS * CHUNK;
        const E* row = row_pointer(r);
        E* to = tile.at(r, c);
        if (aligned) {
            if (row != nullptr && c < cols) dev::copy_async16(to, row + c);
            else *(Bytes16*)to = Bytes16{};
        } else {
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) {
                if (row != nullptr && c + e < cols) to[e] = row[c + e];
                else to[e] = E{};
            }
        }
    }
}

// ================================================================================== how a warp multiplies tiles
//
// With g = lane / 4 and t = lane % 4 a 16 x 8 block C of a result is four numbers a thread, whatever T:
//     c[0] (g, 2t)   c[1] (g, 2t + 1)   c[2] (g + 8, 2t)   c[3] (g + 8, 2t + 1)
// Mma<T> has, for products over K of the shared axis at a time:
//     load_a     A = rows of a tile                    (a row of the tile is a row of A)
//     load_a_bt  the same, with the shared axis in the order of load_bt
//     load_b     two blocks of B = rows of a tile, transposed  (a row of the tile is a column of B)
//     load_bt    two blocks of B = rows of a tile      (a row of the tile is a row of B)
//     from_c     A = a result C, rounded to T          (pairs with load_bt)
//     mma        C += A B
//     multiply   A *= factor, where T is as wide as Acc
template <class E> struct Mma;

template <bool IS_F16> struct Mma16 {  // f16 and bf16: m16n8k16
    using E = typename Either<IS_F16, f16, bf16>::type;
    using Acc = float;
    static constexpr int K = 16;
    struct A { u32 x[4]; };
    struct B { u32 x[2]; };

    template <int COLS> static __device__ __forceinline__ void load_a(A& a, Tile<E, COLS> s, int row, int k) {
        const int lane = threadIdx.x & 31;
        dev::ldmatrix(a.x, s.at(row + (lane & 15), k + (lane >> 4) * 8));
    }
    template <int COLS> static __device__ __forceinline__ void load_a_bt(A& a, Tile<E, COLS> s, int row, int k) {
        load_a(a, s, row, k);
    }
    template <int COLS> static __device__ __forceinline__ void load_b(B (&b)[2], Tile<E, COLS> s, int n, int k) {
        const int lane = threadIdx.x & 31;
        u32 r[4];
        dev::ldmatrix(r, s.at(n + (lane & 7) + (lane >> 4) * 8, k + (lane >> 3 & 1) * 8));
        b[0].x[0] = r[0], b[0].x[1] = r[1], b[1].x[0] = r[2], b[1].x[1] = r[3];
    }
    template <int COLS> static __device__ __forceinline__ void load_bt(B (&b)[2], Tile<E, COLS> s, int k, int n) {
        const int lane = threadIdx.x & 31;
        u32 r[4];
        dev::ldmatrix_transposed(r, s.at(k + (lane & 15), n + (lane >> 4) * 8));
        b[0].x[0] = r[0], b[0].x[1] = r[1], b[1].x[0] = r[2], b[1].x[1] = r[3];
    }
    static __device__ __forceinline__ void multiply(A&, float) {}
    static __device__ __forceinline__ u32 pack(float lo, float hi) {
        return IS_F16 ? dev::pack_f16(lo, hi) : dev::pack_bf16(lo, hi);
    }
    template <int N> static __device__ __forceinline__ void from_c(A& a, const float (&c)[N][4], int k) {
        a.x[0] = pack(c[2 * k][0], c[2 * k][1]), a.x[1] = pack(c[2 * k][2], c[2 * k][3]);
        a.x[2] = pack(c[2 * k + 1][0], c[2 * k + 1][1]), a.x[3] = pack(c[2 * k + 1][2], c[2 * k + 1][3]);
    }
    static __device__ __forceinline__ void mma(float (&c)[4], const A& a, const B& b) {
        if (IS_F16) dev::mma_f16(c, a.x, b.x);
        else dev::mma_bf16(c, a.x, b.x);
    }
};
template <> struct Mma<f16> : Mma16<true> {};
template <> struct Mma<bf16> : Mma16<false> {};

template <class F> struct MmaWide {  // float and double: eight of the shared axis at a time
    using E = F;
    using Acc = F;
    static constexpr int K = 8;
    struct A { F x[4]; };
    struct B { F x[2]; };

    template <int COLS> static __device__ __forceinline__ void load_a(A& a, Tile<F, COLS> s, int row, int k) {
        const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        a.x[0] = *s.at(row + g, k + t), a.x[1] = *s.at(row + g + 8, k + t);
        a.x[2] = *s.at(row + g, k + t + 4), a.x[3] = *s.at(row + g + 8, k + t + 4);
    }
    template <int COLS> static __device__ __forceinline__ void load_b(B (&b)[2], Tile<F, COLS> s, int n, int k) {
        const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
        for (int i = 0; i < 2; ++i) b[i].x[0] = *s.at(n + i * 8 + g, k + t), b[i].x[1] = *s.at(n + i * 8 + g, k + t + 4);
    }
    static __device__ __forceinline__ void multiply(A& a, F factor) {
#pragma unroll
        for (int r = 0; r < 4; ++r) a.x[r] *= factor;
    }
    // The shared axis may be visited in any order that A and B agree on: here 2t, 2t + 1, because that is where
    // a thread has its part of C.
    template <int COLS> static __device__ __forceinline__ void load_bt(B (&b)[2], Tile<F, COLS> s, int k, int n) {
        const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            b[i].x[0] = *s.at(k + 2 * t, n + i * 8 + g), b[i].x[1] = *s.at(k + 2 * t + 1, n + i * 8 + g);
    }
    template <int COLS> static __device__ __forceinline__ void load_a_bt(A& a, Tile<F, COLS> s, int row, int k) {
        const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        a.x[0] = *s.at(row + g, k + 2 * t), a.x[1] = *s.at(row + g + 8, k + 2 * t);
        a.x[2] = *s.at(row + g, k + 2 * t + 1), a.x[3] = *s.at(row + g + 8, k + 2 * t + 1);
    }
    template <int N> static __device__ __forceinline__ void from_c(A& a, const F (&c)[N][4], int k) {
        a.x[0] = c[k][0], a.x[1] = c[k][2], a.x[2] = c[k][1], a.x[3] = c[k][3];
    }
    // x = hi + lo up to 2^-23. The end of the range must not round to inf; inf and NaN go to lo.
    static __device__ __forceinline__ void halve(float x, float& hi, float& lo) {
        const float top = __uint_as_float(0x7f7fe000u);
        hi = dev::round_tf32(fminf(fmaxf(x, -top), top)), lo = dev::round_tf32(x - hi);
    }
    // float as three tf32 products of high and low parts: 22 of float32's 24 bits
    static __device__ __forceinline__ void mma(float (&c)[4], const A& a, const B& b) {
        float a_hi[4], a_lo[4], b_hi[2], b_lo[2];
#pragma unroll
        for (int r = 0; r < 4; ++r) halve(a.x[r], a_hi[r], a_lo[r]);
#pragma unroll
        for (int r = 0; r < 2; ++r) halve(b.x[r], b_hi[r], b_lo[r]);
        dev::mma_tf32(c, a_lo, b_hi), dev::mma_tf32(c, a_hi, b_lo), dev::mma_tf32(c, a_hi, b_hi);
    }
    static __device__ __forceinline__ void mma(double (&c)[4], const A& a, const B& b) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            dev::mma_f64(c[0], c[1], a.x[2 * r], b.x[r]);
            dev::mma_f64(c[2], c[3], a.x[2 * r + 1], b.x[r]);
        }
    }
};
template <> struct Mma<float> : MmaWide<float> {};
template <> struct Mma<double> : MmaWide<double> {};

using M = Mma<T>;
using Acc = typename M::Acc;

__device__ __forceinline__ Acc exp_of(Acc x) { return exp_for<T>(x); }
__device__ __forceinline__ Acc unit() { return (Acc)UNIT<T>; }
__device__ __forceinline__ Acc minus_infinity() { return (Acc)__uint_as_float(0xff800000u); }
__device__ __forceinline__ Acc not_a_number() { return (Acc)__uint_as_float(0x7fffffffu); }

// The scale goes where nothing overflows on the way (contract.split_scale): one up to 1 on the rows before a product,
// a larger one on what comes out. 16-bit numbers would lose bits before, and cannot overflow a float after.
__device__ __forceinline__ Acc scale_before(const Params& p) { return fabs(p.scale) <= 1.0 ? (Acc)p.scale : Acc(1); }
__device__ __forceinline__ Acc scale_after(const Params& p) { return fabs(p.scale) <= 1.0 ? Acc(1) : (Acc)p.scale; }

// s = rows of `a`, times `factor` where T is wide, times rows of `b`, transposed: FRAGS x (16, STEP) per warp, the
// shared axis COLS long.
template <int COLS>
__device__ __forceinline__ void multiply_rows(Acc (&s)[FRAGS][STEP / 8][4], Tile<T, COLS> a, int first_row, Tile<T, COLS> b,
                                              Acc factor) {
#pragma unroll
    for (int f = 0; f < FRAGS; ++f)
#pragma unroll
        for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[f][n][e] = 0;
    constexpr int UNROLL = COLS / M::K <= 8 ? COLS / M::K : 4;
#pragma unroll UNROLL
    for (int k = 0; k < COLS; k += M::K) {
        typename M::A x[FRAGS];
#pragma unroll
        for (int f = 0; f < FRAGS; ++f) M::load_a(x[f], a, first_row + f * 16, k), M::multiply(x[f], factor);
#pragma unroll
        for (int n = 0; n < STEP / 8; n += 2) {
            typename M::B y[2];
            M::load_b(y, b, n * 8, k);
#pragma unroll
            for (int f = 0; f < FRAGS; ++f) M::mma(s[f][n], x[f], y[0]), M::mma(s[f][n + 1], x[f], y[1]);
        }
    }
}

// acc += p (FRAGS x (16, STEP)) times rows [0, STEP) of `b`, its columns from first_col on; where these end inside
// acc, the rest of acc is never stored.
template <int N, int COLS>
__device__ __forceinline__ void multiply_into(Acc (&acc)[FRAGS][N][4], const Acc (&p)[FRAGS][STEP / 8][4], Tile<T, COLS> b,
                                              int first_col) {
#pragma unroll
    for (int k = 0; k < STEP / M::K; ++k) {
        typename M::A x[FRAGS];
#pragma unroll
        for (int f = 0; f < FRAGS; ++f) M::from_c(x[f], p[f], k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            typename M::B y[2];
            M::load_bt(y, b, k * M::K, min(first_col + n * 8, COLS - 16));
#pragma unroll
            for (int f = 0; f < FRAGS; ++f) M::mma(acc[f][n], x[f], y[0]), M::mma(acc[f][n + 1], x[f], y[1]);
        }
    }
}

// ============================================================================================== inf and NaN
//
// A masked pair must contribute nothing, and 0 * NaN is NaN. So where a step may hold masked pairs, inf and NaN are
// taken out of the tile whose rows are summed (clean_tile). Nearly always there are none, and the test is the only
// cost. If there were some, the rows that held them are found again in memory (find_bad_rows), and what was taken out
// is added for the weights that are not zero (add_bad_rows).

template <class E> __device__ __forceinline__ bool all_finite(const Bytes16& chunk) {
    bool finite = true;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const u32 x = chunk.x[w];
        if (sizeof(E) == 2) {  // adding one unit to an exponent of all ones carries into the sign
            constexpr bool IS_F16 = Same<E, f16>::value;
            const u32 exponents = IS_F16 ? 0x7c007c00u : 0x7f807f80u, unit = IS_F16 ? 0x04000400u : 0x00800080u;
            finite = finite && (((x & exponents) + unit) & 0x80008000u) == 0;
        }
        if (sizeof(E) == 4) finite = finite && (x & 0x7f800000u) != 0x7f800000u;
        if (sizeof(E) == 8 && w % 2 == 1) finite = finite && (x & 0x7ff00000u) != 0x7ff00000u;
    }
    return finite;
}
__device__ __forceinline__ bool is_finite(float x) { return x - x == 0.f; }
__device__ __forceinline__ bool is_finite(double x) { return x - x == 0.0; }

// Zero the inf and NaN in what this thread itself copied (load_tile's loop). True when there were some.
template <class E, int COLS> __device__ __forceinline__ bool clean_tile(Tile<E, COLS> tile, int rows) {
    constexpr int CHUNK = Tile<E, COLS>::CHUNK, CHUNKS = COLS / CHUNK;
    bool found = false;
#pragma unroll 1
    for (int n = threadIdx.x; n < rows * CHUNKS; n += THREADS) {
        E* chunk = tile.at(n / CHUNKS, n % CHUNKS * CHUNK);
        if (all_finite<E>(*(const Bytes16*)chunk)) continue;
        found = true;
        for (int e = 0; e < CHUNK; ++e) if (!is_finite(to_acc(chunk[e]))) chunk[e] = E{};
    }
    return found;
}

// Whether row r of a tile is bad; kept in the padding of that row.
template <class E, int COLS> __device__ __forceinline__ int* bad_row(Tile<E, COLS> tile, int r) { return (int*)tile.at(r, COLS); }

// bad_row(tile, r) = whether row r holds inf or NaN in memory; the arguments are load_tile's.
template <int COLS, class RowPointer>
__device__ __forceinline__ void find_bad_rows(Tile<T, COLS> tile, int rows, int cols, RowPointer row_pointer) {
#pragma unroll 1
    for (int r = threadIdx.x; r < rows; r += THREADS) {
        const T* row = row_pointer(r);
        int found = 0;
#pragma unroll 1
        for (int c = 0; c < cols && row != nullptr; ++c) found |= !is_finite(to_acc(row[c]));
        *bad_row(tile, r) = found;
    }
}

// acc += p times the inf and NaN of the rows that is_bad(r) (the same for the whole warp), columns from first_col on;
// row_pointer(r) is row r in memory.
template <int N, class IsBad, class RowPointer>
__device__ __forceinline__ void add_bad_rows_if(Acc (&acc)[FRAGS][N][4], const Acc (&p)[FRAGS][STEP / 8][4], IsBad is_bad,
                                                int first_col, int cols, RowPointer row_pointer) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int j = 0; j < STEP; ++j) {
        if (!is_bad(j)) continue;
        const T* const row = row_pointer(j) + first_col + (lane & 3) * 2;
#pragma unroll
        for (int r = 0; r < 2 * FRAGS; ++r) {
            Acc w = 0;  // this row's weight of j, from the lane of the quad that has it
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n) {  // both by value: choosing between addresses would put p in memory
                const Acc even = p[r / 2][n][r % 2 * 2], odd = p[r / 2][n][r % 2 * 2 + 1];
                w = n != j / 8 ? w : j & 1 ? odd : even;
            }
            w = __shfl_sync(WARP_ALL, w, (lane & ~3) | (j & 7) >> 1);
            if (w == Acc(0)) continue;
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (first_col + n * 8 + (lane & 3) * 2 + e >= cols) continue;
                    const Acc x = to_acc(dev::load_in_order(row + n * 8 + e));
                    if (!is_finite(x)) acc[r / 2][n][r % 2 * 2 + e] += w * x;
                }
        }
    }
}
template <int N, int COLS, class RowPointer>  // those that find_bad_rows marked
__device__ __forceinline__ void add_bad_rows(Acc (&acc)[FRAGS][N][4], const Acc (&p)[FRAGS][STEP / 8][4], Tile<T, COLS> tile,
                                             int first_col, int cols, RowPointer row_pointer) {
    add_bad_rows_if(acc, p, [&](int j) { return *bad_row(tile, j) != 0; }, first_col, cols, row_pointer);
}

// out[at] = y, and in rest (16-bit T, where it is asked for) what rounding took from it.
__device__ __forceinline__ void store_out(const Params& p, i64 at, Acc y) {
    T rounded;
    store(&rounded, y);
    ((T*)p.out)[at] = rounded;
    if (sizeof(T) > 2 || p.rest == nullptr) return;
    const Acc lost = y - to_acc(rounded);
    store((T*)p.rest + at, is_finite(lost) ? lost : Acc(0));
}

// The logit of one visible pair from its dot product. `capped` is what softcap made of it, for the backward pass.
__device__ __forceinline__ Acc logit_of(const Params& p, Acc dot, Acc& capped) {
    Acc x = dot * (sizeof(T) == 2 ? (Acc)p.scale : scale_after(p));
    if (HAS_SOFTCAP) x = (Acc)p.softcap * tanh_of(x * (Acc)(1.0 / p.softcap));
    capped = x;
    return x;
}
