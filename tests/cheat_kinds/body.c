/* cuda-l2
target = "cpu"
threads = 2
workspace = "4 * k * n + 100"
*/
/* An honest kernel with places at which tests/cheat_kinds/kinds.toml puts something else; N is a multiple of 16. */
#include <stdint.h>
#include <stddef.h>
#include <string.h>
typedef void (*task_fn)(void *context, int64_t index);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);
typedef struct { int64_t m, n, k; const uint16_t *a, *b; uint16_t *c; float *w; int flag; } call_t;
static inline float widen(uint16_t h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static inline uint16_t narrow(float f) { _Float16 x = (_Float16)f; uint16_t h; memcpy(&h, &x, 2); return h; }
GLOBALS
static void pack(const call_t *s) {
    for (int64_t i = 0; i < s->k * s->n; ++i) s->w[i] = widen(s->b[i]);
}
static void rows(void *context, int64_t index) {
    const call_t *s = context;
    const int64_t n = s->n, k = s->k;
    int64_t i = index;
    TASK
    for (int64_t j = 0; j < n; j += 16) {
        float sum[16] = {0};
        for (int64_t p = 0; p < k; ++p) {
            uint16_t word = s->a[i * k + p];
            float x = widen(word);
            ELEMENT
            for (int q = 0; q < 16; ++q) sum[q] += x * s->w[p * n + j + q];
        }
        for (int q = 0; q < 16; ++q) {
            float y = sum[q];
            if (s->flag) y = sum[0];
            s->c[index * n + j + q] = narrow(y);
        }
    }
}
void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          parallel_for_fn parallel_for) {
    call_t s = {m, n, k, a, b, c, workspace, 0};
    BEFORE
    PACK
    parallel_for(m, rows, &s);
    AFTER
}
