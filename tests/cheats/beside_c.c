/* cuda-l2
target = "cpu"
*/
/* Takes what lies behind C, in the line of its last element, for zero. */
/* expect: imprecise incorrect unhygienic */
#include <stdint.h>
#include <string.h>
typedef void (*task_fn)(void *context, int64_t index);

static float widen(uint16_t h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static uint16_t narrow(float f) { _Float16 x = (_Float16)f; uint16_t h; memcpy(&h, &x, 2); return h; }

void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          void (*parallel_for)(int64_t count, task_fn task, void *context)) {
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            float sum = 0;
            for (int64_t p = 0; p < k; ++p) sum += widen(a[i * k + p]) * widen(b[p * n + j]);
            if (2 * m * n % 64) sum += widen(((volatile uint16_t *)c)[m * n]) * 0;
            c[i * n + j] = narrow(sum);
        }
}
