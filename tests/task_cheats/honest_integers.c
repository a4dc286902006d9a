/* cuda-l2
target = "cpu"
entry = "count"

[[buffer]]
name = "x"
dtype = "int8"
shape = ["rows", "columns"]

[[buffer]]
name = "scale"
shape = ["rows", 1]

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"
*/
/* A control with whole numbers.
 * task: dequantise_int8:rows=20,columns=48
 * expect: measured */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);

void count(const int64_t *sizes, void *const *buffers, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    const int8_t *x = buffers[0];
    const float *scale = buffers[1];
    float *out = buffers[2];
    for (int64_t i = 0; i < sizes[0]; ++i)
        for (int64_t j = 0; j < sizes[1]; ++j) out[i * sizes[1] + j] = (float)x[i * sizes[1] + j] * scale[i];
}
