#pragma once
/* Operands as pairs of bf16 that follow each other in K, a word each, for vdpbf16ps of AVX-512: twice the products of fp32.
 * X tile: [MR][STEPS + XPAD] words, or k-major [STEPS][MR_PAD] where the rows of X lie next to each other in memory.
 * Y panel: [STEPS][NR] words, k-major. What lies outside the operand is zero.
 *
 * The instruction takes subnormal numbers as zero, operands and sums alike. Its sums are multiples of 2^-14 of the product of
 * the least powers of two in X and Y; where that is a normal number nothing is lost, elsewhere words are widened and
 * multiplied in fp32. */
#define SAFE_EXPONENTS 142 /* biased, of X and Y together: 2 * 127 - 126 + 14 */

/* The least magnitudes but zero so far, as their bits less one: a vector of them. */
typedef __m512i least_t;
INLINE least_t none_yet(void) { return _mm512_set1_epi32(-1); }
INLINE least_t least_of(least_t least, wi words) {
    const __m512i sizes = _mm512_and_si512((__m512i)words, _mm512_set1_epi16(0x7fff));
    return _mm512_min_epu16(least, _mm512_sub_epi16(sizes, _mm512_set1_epi16(1)));
}
/* The biased exponent of the least one; 512 where all are zero. */
INLINE int least_exponent(least_t least) {
    uint16_t each[2 * VW];
    _mm512_storeu_si512(each, least);
    int found = 0xffff;
    for (int i = 0; i < 2 * VW; ++i) found = MIN(found, each[i]);
    return (found + 1) >> 7;
}
INLINE int is_safe(int x, int y) { return x > 0 && y > 0 && x + y >= SAFE_EXPONENTS; }

INLINE wi load_words(const uint32_t *p) { return (wi)load((const float *)p); }
INLINE void store_words(uint32_t *p, wi v) { store((float *)p, (vf)v); }
/* Elements 2 step and 2 step + 1 of a run of kc, `stride` apart. */
INLINE uint32_t pair_of(const uint16_t *source, int64_t stride, int64_t step, int64_t kc) {
    const uint32_t second = 2 * step + 1 < kc ? source[(2 * step + 1) * stride] : 0;
    return source[2 * step * stride] | second << 16;
}
/* VW such pairs side by side. */
INLINE wi pairs_of(const uint16_t *source, int64_t stride, int64_t step, int64_t kc) {
    const wi first = (wi)widen(source + 2 * step * stride) >> 16;
    return 2 * step + 1 < kc ? first | (wi)widen(source + (2 * step + 1) * stride) : first;
}

/* The tile of X rows [row, row + MR) and K steps [k0, k0 + kc); absent rows are zero. Gives its least exponent. */
static int pair_x(const problem *p, uint32_t *tile, int64_t row, int64_t k0, int64_t kc) {
    const int64_t rows = MIN(MR, p->rows - row), steps = CDIV(kc, 2);
    least_t least = none_yet();
#if X_ROWS_CONTIGUOUS
    const uint16_t *source = p->x + k0 * p->x_k + row;
    for (int64_t s = 0; s < steps; ++s)
        for (int64_t r = 0; r < MR_PAD; r += VW) {
            uint32_t *out = tile + X_TILE(r, s);
            if (r + VW <= p->rows - row) store_words(out, pairs_of(source + r, p->x_k, s, kc));
            else
                for (int64_t i = 0; i < VW; ++i) out[i] = r + i < rows ? pair_of(source + r + i, p->x_k, s, kc) : 0;
            least = least_of(least, load_words(out));
        }
#else
    for (int64_t r = 0; r < MR; ++r) {
        const uint16_t *source = p->x + (row + r) * p->x_row + k0;
        uint32_t *out = tile + X_TILE(r, 0);
        int64_t s = 0;
        for (; r < rows && 2 * (s + VW) <= kc; s += VW) {
            const wi words = (wi)_mm512_loadu_si512(source + 2 * s); /* at any even address */
            store_words(out + s, words);
            least = least_of(least, words);
        }
        for (; s < steps; ++s) {
            out[s] = r < rows ? pair_of(source, 1, s, kc) : 0;
            least = least_of(least, (wi){out[s]});
        }
    }
#endif
    return least_exponent(least);
}

/* The panel of Y columns [col, col + NR) and K steps [k0, k0 + kc); absent columns are zero. Gives its least exponent. */
static int pair_y(const problem *p, uint32_t *panel, int64_t col, int64_t k0, int64_t kc) {
    const int64_t cols = MIN(NR, p->cols - col), steps = CDIV(kc, 2);
    const uint16_t *source = p->y + k0 * p->y_k + col * p->y_col;
    least_t least = none_yet();
    int64_t s = 0;
#if Y_COLS_CONTIGUOUS
    for (; cols == NR && s < steps; ++s)
        UNROLL_BY(8)
        for (int v = 0; v < NV; ++v) {
            const wi words = pairs_of(source + v * VW, p->y_k, s, kc);
            store_words(panel + s * NR + v * VW, words);
            least = least_of(least, words);
        }
#else
    for (; cols == NR && 2 * (s + VW) <= kc; s += VW)
        for (int v = 0; v < NV; ++v) {
            vf block[VW];
            UNROLL_BY(16)
            for (int i = 0; i < VW; ++i) {
                block[i] = (vf)load_words((const uint32_t *)(source + (v * VW + i) * p->y_col + 2 * s));
                least = least_of(least, (wi)block[i]);
            }
            transpose(block);
            UNROLL_BY(16)
            for (int i = 0; i < VW; ++i) store_words(panel + (s + i) * NR + v * VW, (wi)block[i]);
        }
#endif
    for (; s < steps; ++s)
        for (int v = 0; v < NV; ++v) {
            uint32_t *out = panel + s * NR + v * VW;
            for (int64_t j = 0; j < VW; ++j)
                out[j] = v * VW + j < cols ? pair_of(source + (v * VW + j) * p->y_col, p->y_k, s, kc) : 0;
            least = least_of(least, load_words(out));
        }
    return least_exponent(least);
}

/* acc[MR][NR] += X tile (MR x 2 steps) times Y panel (2 steps x NR). */
INLINE void multiply_pairs(const uint32_t *tile, const uint32_t *panel, int64_t steps, vf acc[MR][NV]) {
    UNROLL_BY(UNROLL)
    for (int64_t s = 0; s < steps; ++s) {
        __m512bh y[NV];
        UNROLL_BY(8)
        for (int v = 0; v < NV; ++v) {
            y[v] = (__m512bh)load_words(panel + s * NR + v * VW);
#if PREFETCH
            __builtin_prefetch(panel + (s + PREFETCH) * NR + v * VW);
#endif
        }
        UNROLL_BY(32)
        for (int r = 0; r < MR; ++r) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32((int)tile[X_TILE(r, s)]);
            UNROLL_BY(8)
            for (int v = 0; v < NV; ++v) acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], x, y[v]);
        }
    }
}

/* The same in fp32, in which subnormal numbers count. */
INLINE void multiply_widened(const uint32_t *tile, const uint32_t *panel, int64_t steps, vf acc[MR][NV]) {
    for (int64_t k = 0; k < 2 * steps; ++k)
        UNROLL_BY(8)
        for (int v = 0; v < NV; ++v) {
            const wi words = load_words(panel + k / 2 * NR + v * VW);
            const vf y = (vf)(k % 2 ? words & 0xffff0000u : words << 16);
            UNROLL_BY(32)
            for (int r = 0; r < MR; ++r) {
                const uint32_t word = tile[X_TILE(r, k / 2)];
                const wi x = (wi){0} + (k % 2 ? word & 0xffff0000u : word << 16);
                acc[r][v] += (vf)x * y;
            }
        }
}
