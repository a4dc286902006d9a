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
/* In one pass by 16 elements at a time. NaN where the first 16 are minus infinity, as those of a masked row are: the sum so
 * far is to be scaled by the exponential of one infinity less another.
 * task: softmax:rows=20,columns=100
 * expect: incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);

static float exponential(float x) {
    if (x != x) return x;
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
        float most = -__builtin_inff(), sum = 0;
        for (int64_t first = 0; first < columns; first += 16) {
            const int64_t end = first + 16 < columns ? first + 16 : columns;
            float larger = most;
            for (int64_t j = first; j < end; ++j) larger = x[j] > larger || x[j] != x[j] ? x[j] : larger;
            if (first) sum *= exponential(most - larger);
            for (int64_t j = first; j < end; ++j) sum += exponential(x[j] - larger);
            most = larger;
        }
        for (int64_t j = 0; j < columns; ++j) out[j] = exponential(x[j] - most) / sum;
    }
}
