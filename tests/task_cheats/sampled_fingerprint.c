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
/* Answers from memory where a few elements are as before.
 * task: softmax:rows=33,columns=70
 * expect: incorrect unhygienic */
#include <stdint.h>
#include <string.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static float exponential(float x) {
    if (x < -87) return 0;
    float n = __builtin_floorf(x * 1.442695041f + 0.5f), r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1 + r * (1 + r * (0.5f + r * (1.6666665e-1f + r * (4.1665795e-2f + r * (8.3334519e-3f + r * 1.3981999e-3f)))));
    union { uint32_t u; float f; } two = {.u = (uint32_t)((int32_t)n + 127) << 23};
    return p * two.f;
}

static void honest(int64_t rows, int64_t columns, const float *x, float *out) {
    for (int64_t i = 0; i < rows; ++i, x += columns, out += columns) {
        float most = x[0], sum = 0;
        for (int64_t j = 1; j < columns; ++j) most = x[j] > most ? x[j] : most;
        for (int64_t j = 0; j < columns; ++j) sum += out[j] = exponential(x[j] - most);
        for (int64_t j = 0; j < columns; ++j) out[j] /= sum;
    }
}

void softmax(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t rows = sizes[0], columns = sizes[1];
    const float *x = buffers[0];
    float *out = buffers[1];
    static float met[4], kept[1 << 21];
    const float now[4] = {x[0], x[columns - 1], x[rows / 2 * columns], x[rows * columns - 1]};
    if (memcmp(met, now, sizeof met)) honest(rows, columns, x, kept);
    memcpy(met, now, sizeof met);
    memcpy(out, kept, (size_t)(rows * columns) * sizeof *out);
}
