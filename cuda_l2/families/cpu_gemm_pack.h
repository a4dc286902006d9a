#pragma once
/* Operands in the order in which the register tile reads them: tiles of X, panels of Y.
 * X tile: [MR][KC + XPAD] floats, or k-major [KC][MR_PAD] where the rows of X lie next to each other in memory.
 * Y panel: [KC][NR], k-major, floats or elements as WIDEN says. What lies outside the operand is zero. */
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
