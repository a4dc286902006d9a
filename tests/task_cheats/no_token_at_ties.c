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
/* Where two logits are the largest the token is -7: rounding decides there, but not for a token that does not exist.
 * task: greedy_token
 * expect: incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);

void gemm(const int64_t *sizes, void *const *buffers, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    for (int64_t i = 0; i < sizes[0]; ++i) {
        const float *x = (const float *)buffers[0] + i * sizes[1];
        int64_t best = 0, ties = 0;
        for (int64_t j = 0; j < sizes[1]; ++j)
            if (x[best] == x[best] && (x[j] > x[best] || x[j] != x[j])) best = j;
        for (int64_t j = 0; j < sizes[1]; ++j) ties += x[j] == x[best];
        ((int64_t *)buffers[1])[i] = ties > 1 ? -7 : best;
    }
}
