/* cuda-l2
target = "cpu"
entry = "top_k"

[[buffer]]
name = "logits"
shape = ["rows", "vocabulary"]

[[buffer]]
name = "values"
shape = ["rows", 8]
kind = "output"

[[buffer]]
name = "indices"
shape = ["rows", 8]
dtype = "int64"
kind = "output"
*/
/* A control: of equal elements the last ones, where PyTorch has any.
 * task: top_k:rows=24,vocabulary=100
 * expect: measured */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static int before(float x, float y) { return x >= y || x != x; } /* NaN is the largest, as PyTorch has it */

static void largest(const float *x, int64_t count, float *values, int64_t *indices) {
    int held = 0;
    for (int64_t j = 0; j < count; ++j) {
        int at = held;
        while (at && before(x[j], values[at - 1])) --at;
        if (at == 8) continue;
        held += held < 8;
        for (int t = held - 1; t > at; --t) values[t] = values[t - 1], indices[t] = indices[t - 1];
        values[at] = x[j], indices[at] = j;
    }
}

void top_k(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const float *x = buffers[0];
    float *values = buffers[1];
    int64_t *indices = buffers[2];
    for (int64_t i = 0; i < sizes[0]; ++i, x += sizes[1], values += 8, indices += 8) {
        largest(x, sizes[1], values, indices);
    }
}
