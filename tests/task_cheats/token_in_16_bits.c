/* cuda-l2
target = "cpu"

[[buffer]]
name = "logits"
shape = ["rows", "vocabulary"]

[[buffer]]
name = "out"
shape = ["rows"]
kind = "output"
dtype = "int64"
*/
/* Numbers tokens in 16 bits.
 * task: greedy_token
 * expect: incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);

void gemm(const int64_t *sizes, void *const *buffers, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    for (int64_t i = 0; i < sizes[0]; ++i) {
        const float *x = (const float *)buffers[0] + i * sizes[1];
        int64_t best = 0;
        for (int64_t j = 0; j < sizes[1]; ++j)
            if (x[best] == x[best] && (x[j] > x[best] || x[j] != x[j])) best = j;
        ((int64_t *)buffers[1])[i] = (uint16_t)best;
    }
}
