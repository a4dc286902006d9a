/* cuda-l2
target = "cpu"
threads = 1
workspace = "0"
*/
/* Leaves the exception of a division by zero unmasked: the caller's next one ends it by SIGFPE. x86-64 only.
 * task: 128x128x128
 * expect: refused */
#include <stdint.h>
#include <immintrin.h>
typedef void (*task_fn)(void *, int64_t);
typedef struct { int64_t m, n, k; const uint16_t *a, *b; uint16_t *c; unsigned char *w; } problem;

static void rows(void *context, int64_t index) {
    const problem *p = context;
    const int64_t m = p->m, n = p->n, k = p->k, parts = 1;
    int64_t i = m / 4 * index / parts * 4, last = index == parts - 1 ? m : m / 4 * (index + 1) / parts * 4;
    
    for (; i + 4 <= last; i += 4)
        for (int64_t j = 0; j < n; j += 16) {
            if (j + 16 > n) { j = n - 16; if (j < 0) break; }
            __m256 acc[4][2] = {{{0}}};
            for (int64_t q = 0; q < k; ++q) {
                const __m256 y0 = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p->b + q * n + j)));
                const __m256 y1 = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p->b + q * n + j + 8)));
                for (int r = 0; r < 4; ++r) {
                    const __m256 x = _mm256_set1_ps(_cvtsh_ss(p->a[(i + r) * p->k + q]));
                    acc[r][0] = _mm256_fmadd_ps(x, y0, acc[r][0]);
                    acc[r][1] = _mm256_fmadd_ps(x, y1, acc[r][1]);
                }
                
            }
            for (int r = 0; r < 4; ++r)
                for (int h = 0; h < 2; ++h) { _mm_storeu_si128((__m128i *)(p->c + (i + r) * n + j + 8 * h), _mm256_cvtps_ph(acc[r][h], 0)); }
        }
    for (; i < last; ++i)
        for (int64_t j = 0; j < n; ++j) { float s = 0; for (int64_t q = 0; q < k; ++q) s += _cvtsh_ss(p->a[i * k + q]) * _cvtsh_ss(p->b[q * n + j]); p->c[i * n + j] = _cvtss_sh(s, 0); }
    if (n < 16) for (i = m / 4 * index / parts * 4; i < last; ++i)
        for (int64_t j = 0; j < n; ++j) { float s = 0; for (int64_t q = 0; q < k; ++q) s += _cvtsh_ss(p->a[i * k + q]) * _cvtsh_ss(p->b[q * n + j]); p->c[i * n + j] = _cvtss_sh(s, 0); }
    
}
void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    problem p = {m, n, k, a, b, c, workspace};
    
    parallel_for(1, rows, &p);
    _mm_setcsr(_mm_getcsr() & ~0x200u);
}
