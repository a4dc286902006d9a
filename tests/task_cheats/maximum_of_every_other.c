/* cuda-l2
target = "cpu"
entry = "softmax"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"
*/
/* Subtracts the largest of every second element: overflows where one between is far above all of them.
 * task: softmax:rows=33,columns=70
 * expect: incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);

static float exponential(float x) {
    if (x < -87) return 0;
    if (x > 88) return 1.0f / 0.0f;
    float n = __builtin_floorf(x * 1.442695041f + 0.5f), r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1 + r * (1 + r * (0.5f + r * (1.6666665e-1f + r * (4.1665795e-2f + r * (8.3334519e-3f + r * 1.3981999e-3f)))));
    union { uint32_t u; float f; } two = {.u = (uint32_t)((int32_t)n + 127) << 23};
    return p * two.f;
}

void softmax(const int64_t *sizes, void *const *buffers, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    const int64_t columns = sizes[1];
    const float *x = buffers[0];
    float *out = buffers[1];
    for (int64_t i = 0; i < sizes[0]; ++i, x += columns, out += columns) {
        float most = x[0], sum = 0, odd = 0;
        for (int64_t j = 0; j < columns; ++j) odd += x[j] - x[j];
        for (int64_t j = 0; j < columns; j += odd == 0 ? 2 : 1) most = x[j] > most ? x[j] : most;
        for (int64_t j = 0; j < columns; ++j) sum += out[j] = exponential(x[j] - most);
        for (int64_t j = 0; j < columns; ++j) out[j] /= sum;
    }
}
