#include "sums.h"
static float total(float *x, long n) {
    vec sum[NV] = {0};
    float all = 0;
    long j = 0;
    for (; j + STEP <= n; j += STEP) {
        __builtin_prefetch(x + j + AHEAD);
        EACH(v) sum[v] += AT(x, v);
    }
    for (; j < n; ++j) all += x[j];
    EACH(v) for (int i = 0; i < VW; ++i) all += sum[v][i];
    return all;
}
void f(const long *sizes, float **buffers) {
    for (long row = 0; row < sizes[0]; ++row)
        buffers[1][row] = total(buffers[0] + row * sizes[1], sizes[1]);
}
