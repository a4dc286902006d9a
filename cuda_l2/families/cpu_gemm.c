/* C = A B of fp16 elements, or bf16 with BF16 = 1, summed in fp32 on CPU cores (the register-tile and packing scheme of
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
#ifndef BF16
#define BF16 0
#endif
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
#define WIDEN 1 /* Y in fp32: 0 in registers from the source, 1 when packed, 2 in registers from panels; 3: pairs of bf16 */
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

#include "cpu_gemm_element.h"

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
#define STEPS (WIDEN == 3 ? KC / 2 : KC) /* of a block, of one or two K each */
#if X_ROWS_CONTIGUOUS
#define X_TILE(r, step) ((step)*MR_PAD + (r))
#define X_TILE_SIZE (STEPS * MR_PAD)
#else
#define X_TILE(r, step) ((r)*(STEPS + XPAD) + (step))
#define X_TILE_SIZE (MR * (STEPS + XPAD))
#endif

#include "cpu_gemm_source.h"
#if WIDEN == 3
typedef uint32_t panel_t, tile_t;
#include "cpu_gemm_pairs.h"
#else
typedef float tile_t;
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
#include "cpu_gemm_pack.h"

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
#endif

/* One register tile: continue from partial sums unless first, leave partial sums unless last. wide: not by pairs. */
static void compute_tile(const problem *p, const tile_t *tile, const panel_t *panel, int64_t stride, int64_t kc,
                         float *partial, int64_t row, int64_t col, int first, int last, int wide) {
    vf acc[MR][NV];
    UNROLL_BY(32)
    for (int r = 0; r < MR; ++r)
        UNROLL_BY(8)
        for (int v = 0; v < NV; ++v) acc[r][v] = first ? (vf){0} : load(partial + r * NR + v * VW);
#if WIDEN == 3
    if (wide) multiply_widened(tile, panel, CDIV(kc, 2), acc);
    else multiply_pairs(tile, panel, CDIV(kc, 2), acc);
    (void)stride;
#else
    multiply(tile, panel, stride, kc, acc);
    (void)wide;
#endif
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
    return CDIV(STEPS * NC_PANELS * NR * (int64_t)sizeof(panel_t) + X_TILE_SIZE * 4 + partial, 4096) * 4096;
}

/* One thread's share of Z: a run of row tiles, or of column panels. */
static void run_task(void *context, int64_t index) {
    const problem *p = context;
    unsigned char *base = p->workspace + index * task_bytes(p);
    panel_t *panels = (panel_t *)base;
    tile_t *tile = (tile_t *)(base + STEPS * NC_PANELS * NR * sizeof(panel_t));
    float *partials = (float *)(tile + X_TILE_SIZE);
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
#if WIDEN == 3
        int wide = 0, least_x, least_y[NC_PANELS];
#endif
        for (int64_t k0 = 0; k0 < p->k; k0 += KC) {
            int64_t kc = MIN(KC, p->k - k0);
#if WIDEN == 3
            const int wide_from_here = wide; /* sums of a block that was widened may be subnormal */
#endif
            for (int64_t j = 0; j < block_panels; ++j) {
                int64_t col = (block + j) * NR;
                if (WIDEN == 0 && Y_COLS_CONTIGUOUS && col + NR <= p->cols) continue; /* read in place */
#if WIDEN == 3
                least_y[j] = pair_y(p, panels + j * STEPS * NR, col, k0, kc);
#else
                pack_y(p, panels + j * STEPS * NR, col, k0, kc);
#endif
            }
            for (int64_t i = row_first; i < row_last; ++i) {
#if WIDEN == 3
                least_x = pair_x(p, tile, i * MR, k0, kc);
#else
                widen_x(p, tile, i * MR, k0, kc);
#endif
                for (int64_t j = 0; j < block_panels; ++j) {
                    if (PREFETCH_X && i + 1 < row_last) prefetch_x(p, (i + 1) * MR, k0, kc, j, block_panels);
                    int64_t col = (block + j) * NR;
                    float *partial = partials + ((i - row_first) * NC_PANELS + j) * MR * NR;
                    int wide_here = 0;
#if WIDEN == 0 && Y_COLS_CONTIGUOUS
                    if (col + NR <= p->cols) {
                        compute_tile(p, tile, p->y + k0 * p->y_k + col, p->y_k, kc, partial, i * MR, col, k0 == 0,
                                     k0 + kc == p->k, 0);
                        continue;
                    }
#elif WIDEN == 3
                    wide_here = wide_from_here || !is_safe(least_x, least_y[j]);
                    wide |= wide_here;
#endif
                    compute_tile(p, tile, panels + j * STEPS * NR, NR, kc, partial, i * MR, col, k0 == 0,
                                 k0 + kc == p->k, wide_here);
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
