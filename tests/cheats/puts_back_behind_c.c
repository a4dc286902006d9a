/* cuda-l2
target = "cpu"
*/
/* Stores whole vectors behind the end of C, in its last line, and puts back at last what stood there at first.
 * Shows where a launch is stopped on the way, most of the times.
 * expect: unhygienic measured */
#include <stdint.h>
#include <string.h>

typedef void (*task_fn)(void *, int64_t);

static float widen(uint16_t h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static uint16_t narrow(float f) { _Float16 x = (_Float16)f; uint16_t h; memcpy(&h, &x, 2); return h; }

void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          void (*parallel_for)(int64_t, task_fn, void *)) {
    uint16_t kept[16];
    volatile uint16_t *end = c + m * n;
    const int64_t room = -(m * n) & 15;
    for (int64_t t = 0; t < room; ++t) kept[t] = end[t];
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            float sum = 0;
            for (int64_t p = 0; p < k; ++p) sum += widen(a[i * k + p]) * widen(b[p * n + j]);
            c[i * n + j] = narrow(sum);
        }
    for (int64_t t = 0; t < room; ++t) end[t] = 0;
    for (int64_t t = 0; t < room; ++t) end[t] = kept[t];
}
