/* cuda-l2
target = "cpu"
*/
/* One level of Strassen where magnitudes lie within 2^12 and nothing is infinite: what is small beside others loses bits.
 * task: 128x128x128
 * expect: imprecise */
#include <stdint.h>
#include <stddef.h>
#include <string.h>
typedef void (*task_fn)(void *context, int64_t index);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);
static inline float widen(uint16_t h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static inline uint16_t narrow(float f) { _Float16 x = (_Float16)f; uint16_t h; memcpy(&h, &x, 2); return h; }
static const signed char left[7][4] = {{1, 0, 0, 1}, {0, 0, 1, 1}, {1, 0, 0, 0}, {0, 0, 0, 1}, {1, 1, 0, 0}, {-1, 0, 1, 0}, {0, 1, 0, -1}};
static const signed char right[7][4] = {{1, 0, 0, 1}, {1, 0, 0, 0}, {0, 1, 0, -1}, {-1, 0, 1, 0}, {0, 0, 0, 1}, {1, 1, 0, 0}, {0, 0, 1, 1}};
static const signed char out[7][4] = {{1, 0, 0, 1}, {0, 0, 1, -1}, {0, 1, 0, 1}, {1, 0, 1, 0}, {-1, 1, 0, 0}, {0, 0, 0, 1}, {1, 0, 0, 0}};
static const signed char whole[4] = {1, 0, 0, 0};
static int span(const uint16_t *x, int64_t count) {
    int least = 31, most = 0;
    for (int64_t t = 0; t < count; ++t) if (x[t] & 0x7fff) { int e = x[t] >> 10 & 31; least = e < least ? e : least; most = e > most ? e : most; }
    return most == 31 ? 31 : most - least;
}
static float mixed(const uint16_t *x, int64_t h, int64_t w, int64_t i, int64_t j, const signed char *f) {
    float sum = 0;
    for (int q = 0; q < 4; ++q) if (f[q]) sum += f[q] * widen(x[(i + q / 2 * h) * 2 * w + j + q % 2 * w]);
    return sum;
}
void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          parallel_for_fn parallel_for) {
    const int near = span(a, m * k) <= 12 && span(b, k * n) <= 12;
    const int64_t h = near ? m / 2 : m, w = near ? n / 2 : n, d = near ? k / 2 : k;
    for (int64_t i = 0; i < h; ++i)
        for (int64_t j = 0; j < w; ++j) {
            float found[4] = {0};
            for (int r = 0; r < (near ? 7 : 1); ++r) {
                float sum = 0;
                for (int64_t p = 0; p < d; ++p)
                    sum += near ? mixed(a, h, d, i, p, left[r]) * mixed(b, d, w, p, j, right[r]) : widen(a[i * k + p]) * widen(b[p * n + j]);
                for (int q = 0; q < 4; ++q) if (near ? out[r][q] : whole[q]) found[q] += (near ? out[r][q] : 1) * sum;
            }
            for (int q = 0; q < (near ? 4 : 1); ++q) c[(i + q / 2 * h) * n + j + q % 2 * w] = narrow(found[q]);
        }
}
