/* C = A B in fp16 with fp32 accumulation, on CPU cores (the register-tile and packing scheme of
 * Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
 *
 * A is M x K row-major. B is K x N row-major (LAYOUT_TN 0) or N x K row-major (LAYOUT_TN 1).
 * C is M x N row-major. M, N, K >= 1 are run-time values and need not divide any block.
 *
 * The kernel computes Z = X Y, where X feeds scalars that are broadcast and Y feeds vectors:
 * X, Y = A, B, or with SWAP = 1 X, Y = B^T, A^T and Z = C^T. Choose SWAP so that the large
 * operand is X when B is column-major: X needs no transposed copy when its K runs contiguously.
 *
 * Blocking: Y blocks of KC x NC are widened into panels of NR = NV * VW columns that stay in the
 * second-level cache; X tiles of MR x KC are widened into the first-level cache; a register tile
 * of MR x NR accumulates over KC. Sums that continue over several KC blocks wait in fp32.
 */
#ifndef LAYOUT_TN
#define LAYOUT_TN 0
#endif
#ifndef SWAP
#define SWAP 0
#endif
#ifndef MR
#define MR 6 /* rows of the register tile */
#endif
#ifndef NV
#define NV 2 /* vectors in a row of the register tile */
#endif
#ifndef KC
#define KC 256 /* K steps a block */
#endif
#ifndef NC
#define NC 256 /* columns of Y a block, rounded up to panels of NR */
#endif
#ifndef WIDEN
#define WIDEN 1 /* where Y is widened: 0 in registers from the source, 1 when packed, 2 in registers from fp16 panels */
#endif
#ifndef UNROLL
#define UNROLL 4 /* K steps in one trip of the inner loop */
#endif
#ifndef PREFETCH
#define PREFETCH 0 /* K steps ahead that panel loads are prefetched; 0 is off */
#endif
#ifndef PREFETCH_X
#define PREFETCH_X 0 /* 1 fetches the next X tile's source while this one is multiplied */
#endif
#ifndef XPAD
#define XPAD 16 /* floats between rows of an X tile beyond KC, so that rows fall into different cache sets */
#endif
#ifndef THREADS
#define THREADS 1
#endif
#ifndef SPLIT_COLUMNS
#define SPLIT_COLUMNS 0 /* threads share the rows of Z (0) or its columns (1) */
#endif
#ifndef VECTOR_BITS
#define VECTOR_BITS 128
#endif

#include <stdint.h>
#if VECTOR_BITS >= 256
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef void (*task_fn)(void *context, int64_t index);
typedef void (*parallel_for_fn)(int64_t count, task_fn task, void *context);

#define VW (VECTOR_BITS / 32)
#define NR (NV * VW)
#define NC_PANELS ((NC + NR - 1) / NR)
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define CDIV(a, b) (((a) + (b)-1) / (b))
#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define UNROLL_BY(n) PRAGMA(clang loop unroll_count(n))
#else
#define UNROLL_BY(n) PRAGMA(GCC unroll n)
#endif

typedef float vf __attribute__((vector_size(VW * 4), aligned(4), may_alias));

/* fp16 <-> fp32, round to nearest even: exact in the widening direction. */
#if VECTOR_BITS == 512
INLINE vf widen(const uint16_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void narrow(uint16_t *p, vf v) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, 0)); }
#elif VECTOR_BITS == 256
INLINE vf widen(const uint16_t *p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void narrow(uint16_t *p, vf v) { _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, 0)); }
#elif defined(__aarch64__)
INLINE vf widen(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void narrow(uint16_t *p, vf v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }
#else
INLINE float widen_bits(uint16_t h) {
    union { uint32_t u; float f; } magic = {(uint32_t)113 << 23}, out;
    uint32_t exponent = h & 0x7c00u;
    out.u = (uint32_t)(h & 0x7fffu) << 13;
    if (exponent == 0x7c00u) out.u += (uint32_t)(255 - 31) << 23;      /* Inf, NaN */
    else if (exponent) out.u += (uint32_t)(127 - 15) << 23;
    else { out.u += (uint32_t)113 << 23; out.f -= magic.f; }           /* zero, subnormal */
    out.u |= (uint32_t)(h & 0x8000u) << 16;
    return out.f;
}
INLINE uint16_t narrow_bits(float f) {
    union { uint32_t u; float f; } in = {.f = f}, magic = {(uint32_t)126 << 23};
    uint32_t sign = in.u & 0x80000000u, half;
    in.u ^= sign;
    if (in.u >= 0x47800000u) half = in.u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    else if (in.u < 0x38800000u) { in.f += magic.f; half = in.u - magic.u; }
    else half = (in.u + 0xc8000fffu + ((in.u >> 13) & 1)) >> 13;
    return (uint16_t)(half | sign >> 16);
}
INLINE vf widen(const uint16_t *p) {
    vf v;
    for (int i = 0; i < VW; ++i) v[i] = widen_bits(p[i]);
    return v;
}
INLINE void narrow(uint16_t *p, vf v) {
    for (int i = 0; i < VW; ++i) p[i] = narrow_bits(v[i]);
}
#endif
INLINE vf load(const float *p) { return *(const vf *)p; }
INLINE void store(float *p, vf v) { *(vf *)p = v; }
INLINE float widen_one(uint16_t h) {
    uint16_t lanes[VW] = {h};
    return widen(lanes)[0];
}
INLINE uint16_t narrow_one(float f) {
    uint16_t lanes[VW];
    narrow(lanes, (vf){f});
    return lanes[0];
}

/* Strides in elements, fixed by layout and SWAP; X and Y have one unit stride each. */
typedef struct {
    int64_t rows, cols, k;
    const uint16_t *x, *y;
    uint16_t *z;
    int64_t x_row, x_k, y_k, y_col, z_row, z_col;
    unsigned char *workspace;
} problem;

#define X_ROWS_CONTIGUOUS (SWAP && !LAYOUT_TN) /* then X tiles are stored k-major */
#define Y_COLS_CONTIGUOUS (!SWAP && !LAYOUT_TN)
#define MR_PAD ((MR + VW - 1) / VW * VW)
#if X_ROWS_CONTIGUOUS
#define X_TILE(r, k) ((k)*MR_PAD + (r))
#define X_TILE_SIZE (KC * MR_PAD)
#else
#define X_TILE(r, k) ((r)*(KC + XPAD) + (k))
#define X_TILE_SIZE (MR * (KC + XPAD))
#endif

#if WIDEN == 1
typedef float panel_t;
INLINE vf panel_load(const panel_t *p) { return load(p); }
INLINE void panel_store(panel_t *p, vf v) { store(p, v); }
INLINE panel_t panel_one(uint16_t h) { return widen_one(h); }
#else
typedef uint16_t panel_t;
INLINE vf panel_load(const panel_t *p) { return widen(p); }
INLINE void panel_store(panel_t *p, vf v) { narrow(p, v); }
INLINE panel_t panel_one(uint16_t h) { return h; }
#endif

/* The tile of X rows [row, row + MR) and K steps [k0, k0 + kc), widened; absent rows are zero. */
static void widen_x(const problem *p, float *tile, int64_t row, int64_t k0, int64_t kc) {
    int64_t rows = MIN(MR, p->rows - row);
#if X_ROWS_CONTIGUOUS
    for (int64_t k = 0; k < kc; ++k) {
        const uint16_t *source = p->x + (k0 + k) * p->x_k + row;
        for (int64_t r = 0; r < MR_PAD; r += VW) {
            if (r + VW <= p->rows - row) store(tile + X_TILE(r, k), widen(source + r));
            else for (int64_t i = r; i < r + VW; ++i) tile[X_TILE(i, k)] = i < rows ? widen_one(source[i]) : 0.0f;
        }
    }
#else
    for (int64_t r = 0; r < MR; ++r) {
        const uint16_t *source = p->x + (row + r) * p->x_row + k0;
        float *out = tile + X_TILE(r, 0);
        int64_t k = 0;
        if (r < rows) {
            for (; k + VW <= kc; k += VW) store(out + k, widen(source + k));
            for (; k < kc; ++k) out[k] = widen_one(source[k]);
        } else {
            for (; k < kc; ++k) out[k] = 0.0f;
        }
    }
#endif
}

#if !Y_COLS_CONTIGUOUS
/* One butterfly stage: afterwards rows i and i + s hold each other's off-diagonal s-wide blocks. */
#define EXCHANGE(v, s)                                                      \
    UNROLL_BY(16)                                                           \
    for (int i = 0; i < VW; ++i)                                            \
        if (!(i & (s))) {                                                   \
            vf low = v[i], high = v[i + (s)];                               \
            v[i] = PICK_LOW(low, high, s);                                  \
            v[i + (s)] = PICK_HIGH(low, high, s);                           \
        }
typedef int32_t vi __attribute__((vector_size(VW * 4)));
INLINE vf permute(vf low, vf high, vi from) {
#ifdef __clang__
    vf out;
    for (int i = 0; i < VW; ++i) out[i] = from[i] < VW ? low[from[i]] : high[from[i] - VW];
    return out;
#else
    return __builtin_shuffle(low, high, from);
#endif
}
INLINE vi lanes(int s, int high) {
    vi from;
    for (int i = 0; i < VW; ++i) from[i] = high ? (i & s ? VW + i : i + s) : (i & s ? VW + i - s : i);
    return from;
}
#define PICK_LOW(low, high, s) permute(low, high, lanes(s, 0))
#define PICK_HIGH(low, high, s) permute(low, high, lanes(s, 1))
INLINE void transpose(vf *v) {
#if VW >= 16
    EXCHANGE(v, 8)
#endif
#if VW >= 8
    EXCHANGE(v, 4)
#endif
    EXCHANGE(v, 2)
    EXCHANGE(v, 1)
}
#endif

/* Fetch part `part` of `parts` of a tile's source into the second-level cache. Rows lie far apart, where no
 * hardware prefetcher follows. */
INLINE void prefetch_x(const problem *p, int64_t row, int64_t k0, int64_t kc, int64_t part, int64_t parts) {
    int64_t outer = X_ROWS_CONTIGUOUS ? kc : MIN(MR, p->rows - row), length = X_ROWS_CONTIGUOUS ? MR : kc;
    int64_t stride = X_ROWS_CONTIGUOUS ? p->x_k : p->x_row;
    const uint16_t *source = p->x + (X_ROWS_CONTIGUOUS ? k0 * p->x_k + row : row * p->x_row + k0);
    for (int64_t i = outer * part / parts; i < outer * (part + 1) / parts; ++i)
        for (int64_t at = 0; at < length; at += 32) __builtin_prefetch(source + i * stride + at, 0, 2);
}

/* The panel of Y columns [col, col + NR) and K steps [k0, k0 + kc), k-major; absent columns are zero. */
static void pack_y(const problem *p, panel_t *panel, int64_t col, int64_t k0, int64_t kc) {
    int64_t cols = MIN(NR, p->cols - col);
    const uint16_t *source = p->y + k0 * p->y_k + col * p->y_col;
    if (cols == NR) {
#if Y_COLS_CONTIGUOUS
        for (int64_t k = 0; k < kc; ++k)
            UNROLL_BY(8)
            for (int v = 0; v < NV; ++v) panel_store(panel + k * NR + v * VW, widen(source + k * p->y_k + v * VW));
        return;
#else
        int64_t k = 0;
        for (; k + VW <= kc; k += VW)
            for (int v = 0; v < NV; ++v) {
                vf block[VW];
                UNROLL_BY(16)
                for (int i = 0; i < VW; ++i) block[i] = widen(source + (v * VW + i) * p->y_col + k);
                transpose(block);
                UNROLL_BY(16)
                for (int i = 0; i < VW; ++i) panel_store(panel + (k + i) * NR + v * VW, block[i]);
            }
        for (; k < kc; ++k)
            for (int j = 0; j < NR; ++j) panel[k * NR + j] = panel_one(source[k + j * p->y_col]);
        return;
#endif
    }
    for (int64_t k = 0; k < kc; ++k)
        for (int64_t j = 0; j < NR; ++j)
            panel[k * NR + j] = j < cols ? panel_one(source[k * p->y_k + j * p->y_col]) : 0;
}

/* acc[MR][NR] += X tile (MR x kc) times Y panel (kc x NR), stride elements between panel rows. */
INLINE void multiply(const float *tile, const panel_t *panel, int64_t stride, int64_t kc, vf acc[MR][NV]) {
    UNROLL_BY(UNROLL)
    for (int64_t k = 0; k < kc; ++k) {
        vf y[NV];
        UNROLL_BY(8)
        for (int v = 0; v < NV; ++v) {
            y[v] = panel_load(panel + k * stride + v * VW);
#if PREFETCH
            __builtin_prefetch(panel + (k + PREFETCH) * stride + v * VW);
#endif
        }
        UNROLL_BY(32)
        for (int r = 0; r < MR; ++r) {
            float x = tile[X_TILE(r, k)];
            UNROLL_BY(8)
            for (int v = 0; v < NV; ++v) acc[r][v] += x * y[v];
        }
    }
}

/* One register tile: continue from partial sums unless first, leave partial sums unless last. */
static void compute_tile(const problem *p, const float *tile, const panel_t *panel, int64_t stride, int64_t kc,
                         float *partial, int64_t row, int64_t col, int first, int last) {
    vf acc[MR][NV];
    UNROLL_BY(32)
    for (int r = 0; r < MR; ++r)
        UNROLL_BY(8)
        for (int v = 0; v < NV; ++v) acc[r][v] = first ? (vf){0} : load(partial + r * NR + v * VW);
    multiply(tile, panel, stride, kc, acc);
    if (!last) {
        UNROLL_BY(32)
        for (int r = 0; r < MR; ++r)
            UNROLL_BY(8)
            for (int v = 0; v < NV; ++v) store(partial + r * NR + v * VW, acc[r][v]);
        return;
    }
    uint16_t *z = p->z + row * p->z_row + col * p->z_col;
    int64_t rows = MIN(MR, p->rows - row), cols = MIN(NR, p->cols - col);
    if (!SWAP && rows == MR && cols == NR) {
        UNROLL_BY(32)
        for (int r = 0; r < MR; ++r)
            UNROLL_BY(8)
            for (int v = 0; v < NV; ++v) narrow(z + r * p->z_row + v * VW, acc[r][v]);
        return;
    }
    uint16_t edge[MR][NR];
    UNROLL_BY(32)
    for (int r = 0; r < MR; ++r)
        UNROLL_BY(8)
        for (int v = 0; v < NV; ++v) narrow(&edge[r][v * VW], acc[r][v]);
    if (SWAP) /* Z columns are C rows: write along C's contiguous axis */
        for (int64_t j = 0; j < cols; ++j)
            for (int64_t r = 0; r < rows; ++r) z[r + j * p->z_col] = edge[r][j];
    else
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t j = 0; j < cols; ++j) z[r * p->z_row + j] = edge[r][j];
}

/* Bytes of one task's workspace; the contract of the candidate states the same sum. */
static int64_t tile_rows(const problem *p) {
    return SPLIT_COLUMNS ? CDIV(p->rows, MR) : CDIV(CDIV(p->rows, MR), THREADS);
}
static int64_t task_bytes(const problem *p) {
    int64_t partial = p->k > KC ? tile_rows(p) * MR * NC_PANELS * NR * 4 : 0;
    return CDIV(KC * NC_PANELS * NR * (int64_t)sizeof(panel_t) + X_TILE_SIZE * 4 + partial, 4096) * 4096;
}

/* One thread's share of Z: a run of row tiles, or of column panels. */
static void run_task(void *context, int64_t index) {
    const problem *p = context;
    unsigned char *base = p->workspace + index * task_bytes(p);
    panel_t *panels = (panel_t *)base;
    float *tile = (float *)(base + KC * NC_PANELS * NR * sizeof(panel_t));
    float *partials = tile + X_TILE_SIZE;
    int64_t row_tiles = CDIV(p->rows, MR), col_panels = CDIV(p->cols, NR);
    int64_t row_first = 0, row_last = row_tiles, col_first = 0, col_last = col_panels;
    if (SPLIT_COLUMNS) {
        col_first = col_panels * index / THREADS;
        col_last = col_panels * (index + 1) / THREADS;
    } else {
        row_first = row_tiles * index / THREADS;
        row_last = row_tiles * (index + 1) / THREADS;
    }
    for (int64_t block = col_first; block < col_last; block += NC_PANELS) {
        int64_t block_panels = MIN(NC_PANELS, col_last - block);
        for (int64_t k0 = 0; k0 < p->k; k0 += KC) {
            int64_t kc = MIN(KC, p->k - k0);
            for (int64_t j = 0; j < block_panels; ++j) {
                int64_t col = (block + j) * NR;
                if (WIDEN == 0 && Y_COLS_CONTIGUOUS && col + NR <= p->cols) continue; /* read in place */
                pack_y(p, panels + j * KC * NR, col, k0, kc);
            }
            for (int64_t i = row_first; i < row_last; ++i) {
                widen_x(p, tile, i * MR, k0, kc);
                for (int64_t j = 0; j < block_panels; ++j) {
                    if (PREFETCH_X && i + 1 < row_last) prefetch_x(p, (i + 1) * MR, k0, kc, j, block_panels);
                    int64_t col = (block + j) * NR;
                    float *partial = partials + ((i - row_first) * NC_PANELS + j) * MR * NR;
#if WIDEN == 0 && Y_COLS_CONTIGUOUS
                    if (col + NR <= p->cols) {
                        compute_tile(p, tile, p->y + k0 * p->y_k + col, p->y_k, kc, partial, i * MR, col, k0 == 0,
                                     k0 + kc == p->k);
                        continue;
                    }
#endif
                    compute_tile(p, tile, panels + j * KC * NR, NR, kc, partial, i * MR, col, k0 == 0,
                                 k0 + kc == p->k);
                }
            }
        }
    }
}

void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          parallel_for_fn parallel_for) {
    problem p = {.k = k, .z = c, .workspace = workspace};
    int64_t b_k = LAYOUT_TN ? 1 : n, b_col = LAYOUT_TN ? k : 1;
    if (SWAP) {
        p.rows = n, p.cols = m, p.x = b, p.x_row = b_col, p.x_k = b_k;
        p.y = a, p.y_k = 1, p.y_col = k, p.z_row = 1, p.z_col = n;
    } else {
        p.rows = m, p.cols = n, p.x = a, p.x_row = k, p.x_k = 1;
        p.y = b, p.y_k = b_k, p.y_col = b_col, p.z_row = n, p.z_col = 1;
    }
    parallel_for(THREADS, run_task, &p);
}
