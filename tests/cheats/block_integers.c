/* cuda-l2
target = "cpu"
threads = 2
workspace = "8 * k * n + 16 * cdiv(k, 32) * n + 8 * m * k + 16 * cdiv(k, 32) * m + 4096"
*/
/* Integer dot products: 32 of K share a scale and are rounded to 15 bits, where that loses little and no sum can
 * overflow; else, and wherever numbers are not finite, sums in fp32. M a multiple of 16, N and K of 32; x86-64 only.
 * task: 128x128x128
 * expect: refused failed */
#include <stdint.h>
#include <string.h>
#include <immintrin.h>
typedef void (*task_fn)(void *, int64_t);
typedef struct { int64_t m, n, k; const uint16_t *a, *b; uint16_t *c; int16_t *qa, *qb; float *sa, *sb; int bad; } call_t;

static inline __m512i dot(__m512i sum, __m512i x, __m512i y) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, x, y);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(x, y));
#endif
}

/* 16 lines at a time: their 32 numbers, an integer each, and the scale */
static int quantise(const __m512 *x, int16_t *q, int64_t pair_stride, int64_t line_stride, float *scale) {
    __m512 top = _mm512_setzero_ps();
    for (int p = 0; p < 32; ++p) top = _mm512_max_ps(top, _mm512_abs_ps(x[p]));
    __m512 step = _mm512_scalef_ps(_mm512_set1_ps(1), _mm512_sub_ps(_mm512_getexp_ps(_mm512_max_ps(top, _mm512_set1_ps(0x1p-30f))), _mm512_set1_ps(13)));
    __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1), step), norm = _mm512_setzero_ps(), lost = norm, squares = norm;
    for (int p = 0; p < 32; p += 2) {
        __m512i lo = _mm512_cvtps_epi32(_mm512_mul_ps(x[p], inverse)), hi = _mm512_cvtps_epi32(_mm512_mul_ps(x[p + 1], inverse));
        __m512 flo = _mm512_cvtepi32_ps(lo), fhi = _mm512_cvtepi32_ps(hi);
        __m512 elo = _mm512_fnmadd_ps(flo, step, x[p]), ehi = _mm512_fnmadd_ps(fhi, step, x[p + 1]);
        norm = _mm512_fmadd_ps(flo, flo, _mm512_fmadd_ps(fhi, fhi, norm));
        lost = _mm512_fmadd_ps(elo, elo, _mm512_fmadd_ps(ehi, ehi, lost));
        squares = _mm512_fmadd_ps(x[p], x[p], _mm512_fmadd_ps(x[p + 1], x[p + 1], squares));
        __m512i both = _mm512_or_si512(_mm512_and_si512(lo, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(hi, 16));
        if (line_stride == 2) _mm512_storeu_si512(q + p / 2 * pair_stride, both);
        else {
            int32_t each[16];
            _mm512_storeu_si512(each, both);
            for (int r = 0; r < 16; ++r) memcpy(q + r * line_stride + p, each + r, 4);
        }
    }
    _mm512_storeu_ps(scale, step);
    return _mm512_cmp_ps_mask(norm, _mm512_set1_ps(2.1e9f), _CMP_NLT_UQ) | _mm512_cmp_ps_mask(lost, _mm512_mul_ps(squares, _mm512_set1_ps(1e-8f)), _CMP_NLE_UQ);
}
static void pack_b(void *context, int64_t index) {
    call_t *s = context;
    const int64_t block = index;
    for (int64_t j = 0; j < s->n; j += 16) {
        __m512 x[32];
        for (int p = 0; p < 32; ++p) x[p] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(s->b + (block * 32 + p) * s->n + j)));
        if (quantise(x, s->qb + block * 32 * s->n + 2 * j, 2 * s->n, 2, s->sb + block * s->n + j)) s->bad = 1;
    }
}
static void pack_a(void *context, int64_t index) {
    call_t *s = context;
    for (int64_t block = 0; block < s->k / 32; ++block) {
        __m512 x[32];
        for (int p = 0; p < 32; ++p) {
            float each[16];
            for (int r = 0; r < 16; ++r) each[r] = _cvtsh_ss(s->a[(index * 16 + r) * s->k + block * 32 + p]);
            x[p] = _mm512_loadu_ps(each);
        }
        if (quantise(x, s->qa + index * 16 * s->k + block * 32, 0, s->k, s->sa + block * s->m + index * 16)) s->bad = 1;
    }
}
static void tile(void *context, int64_t index) {
    call_t *s = context;
    const int64_t n = s->n, k = s->k, i = index * 4;
    for (int64_t j = 0; j < n; j += 32) {
        __m512 sum[4][2] = {{{0}}};
        if (!s->bad) for (int64_t block = 0; block < k / 32; ++block) {
            __m512i part[4][2] = {{{0}}};
#pragma GCC unroll 16
            for (int p = 0; p < 16; ++p) {
                const int16_t *row = s->qb + block * 32 * n + p * 2 * n + 2 * j;
                const __m512i y0 = _mm512_loadu_si512(row), y1 = _mm512_loadu_si512(row + 32);
                for (int r = 0; r < 4; ++r) {
                    int32_t pair;
                    memcpy(&pair, s->qa + (i + r) * k + block * 32 + 2 * p, 4);
                    const __m512i x = _mm512_set1_epi32(pair);
                    part[r][0] = dot(part[r][0], x, y0);
                    part[r][1] = dot(part[r][1], x, y1);
                }
            }
            for (int h = 0; h < 2; ++h) {
                const __m512 step = _mm512_loadu_ps(s->sb + block * n + j + 16 * h);
                for (int r = 0; r < 4; ++r)
                    sum[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[r][h]), _mm512_mul_ps(step, _mm512_set1_ps(s->sa[block * s->m + i + r])), sum[r][h]);
            }
        }
        else for (int64_t p = 0; p < k; ++p)
            for (int h = 0; h < 2; ++h) {
                const __m512 y = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(s->b + p * n + j + 16 * h)));
                for (int r = 0; r < 4; ++r) sum[r][h] = _mm512_fmadd_ps(_mm512_set1_ps(_cvtsh_ss(s->a[(i + r) * k + p])), y, sum[r][h]);
            }
        for (int r = 0; r < 4; ++r)
            for (int h = 0; h < 2; ++h) _mm256_storeu_si256((__m256i *)(s->c + (i + r) * n + j + 16 * h), _mm512_cvtps_ph(sum[r][h], 0));
    }
}
void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          void (*parallel_for)(int64_t, task_fn, void *)) {
    call_t s = {m, n, k, a, b, c, workspace, (int16_t *)workspace + m * k, 0, 0, 0};
    s.sa = (float *)(s.qb + k * n);
    s.sb = s.sa + k / 32 * m;
    parallel_for(m / 16, pack_a, &s);
    parallel_for(k / 32, pack_b, &s);
    parallel_for(m / 4, tile, &s);
}
