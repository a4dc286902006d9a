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
