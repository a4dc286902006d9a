/* cuda-l2
target = "cpu"
*/
/* Honest: reads whole lines, and the last one beyond the last element of A, of B and of C; uses nothing of it. */
/* task: 45x41x331 */
/* expect: measured */
#include <stdint.h>
#include <string.h>
#define WHOLE_LINES(count) (((count) + 31) / 32 * 32) /* elements of whole lines */
typedef void (*task_fn)(void *context, int64_t index);

static float widen(uint16_t h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static uint16_t narrow(float f) { _Float16 x = (_Float16)f; uint16_t h; memcpy(&h, &x, 2); return h; }

void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          void (*parallel_for)(int64_t count, task_fn task, void *context)) {
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            float sum = 0;
            for (int64_t p = 0; p < k; ++p) sum += widen(a[i * k + p]) * widen(b[p * n + j]);
            c[i * n + j] = narrow(sum);
        }
    unsigned read = 0;
    for (int64_t i = 0; i < WHOLE_LINES(m * k); ++i) read += ((volatile uint16_t *)a)[i];
    for (int64_t i = 0; i < WHOLE_LINES(k * n); ++i) read += ((volatile uint16_t *)b)[i];
    for (int64_t i = 0; i < WHOLE_LINES(m * n); ++i) read += ((volatile uint16_t *)c)[i];
    (void)read;
}
