#include "sums.h"
typedef int mask __attribute__((vector_size(4 * VW)));
void f(const long *sizes, float **buffers) {
    float *x = buffers[0], *out = buffers[1];
    long j = 0, n = sizes[0] * sizes[1];
    for (; j + STEP <= n; j += STEP) {
        __builtin_prefetch(x + j + AHEAD);
        EACH(v) {
            vec a = AT(x, v);
            AT(out, v) = (vec)(~(a <= 0) & (mask)(a * a));
        }
    }
    for (; j < n; ++j) out[j] = x[j] <= 0 ? 0 : x[j] * x[j];
}
