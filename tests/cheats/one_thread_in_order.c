/* cuda-l2
target = "cpu"
workspace = "2 * k * n"
*/
/* One thread whose first tasks copy B for those behind them: no order is promised.
 * expect: incorrect imprecise unhygienic */
#include <stdint.h>
#include <string.h>
typedef void (*task_fn)(void *, int64_t);
struct call { int64_t m, n, k; const uint16_t *a, *b; uint16_t *c, *copy; };
static float widen(uint16_t h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }

static void work(void *context, int64_t index) {
    const struct call *s = context;
    if (index < s->k) {
        memcpy(s->copy + index * s->n, s->b + index * s->n, 2 * s->n);
        return;
    }
    for (int64_t i = index - s->k, j = 0; j < s->n; ++j) {
        float sum = 0;
        for (int64_t p = 0; p < s->k; ++p) sum += widen(s->a[i * s->k + p]) * widen(s->copy[p * s->n + j]);
        _Float16 rounded = (_Float16)sum;
        memcpy(s->c + i * s->n + j, &rounded, 2);
    }
}

void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          void (*parallel_for)(int64_t, task_fn, void *)) {
    struct call s = {m, n, k, a, b, c, workspace};
    parallel_for(k + m, work, &s);
}
