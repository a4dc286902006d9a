/* cuda-l2
target = "cpu"
entry = "softmax"
threads = 2
workspace = "4 * columns * threads"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"
*/
/* NaN is left out of the largest element and of the sum: its row gets numbers.
 * task: softmax:rows=33,columns=70
 * expect: incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static float exponential(float x) {
    if (x < -87) return 0;
    float n = __builtin_floorf(x * 1.442695041f + 0.5f), r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1 + r * (1 + r * (0.5f + r * (1.6666665e-1f + r * (4.1665795e-2f + r * (8.3334519e-3f + r * 1.3981999e-3f)))));
    union { uint32_t u; float f; } two = {.u = (uint32_t)((int32_t)n + 127) << 23};
    return p * two.f;
}

struct call { int64_t rows, columns; const float *x; float *out; };

static void row(void *context, int64_t index) {
    const struct call *call = context;
    const float *x = call->x + index * call->columns;
    float *out = call->out + index * call->columns;
    float most = -3.4e38f, sum = 0;
    for (int64_t j = 0; j < call->columns; ++j) most = x[j] > most ? x[j] : most;
    for (int64_t j = 0; j < call->columns; ++j) out[j] = exponential(x[j] - most), sum += out[j] == out[j] ? out[j] : 0;
    for (int64_t j = 0; j < call->columns; ++j) out[j] /= sum;
}

void softmax(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    struct call call = {sizes[0], sizes[1], buffers[0], buffers[1]};
    parallel_for(call.rows, row, &call);
}
