/* cuda-l2
target = "cpu"
entry = "layer_norm"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "gain"
shape = ["columns"]
kind = "weight"

[[buffer]]
name = "shift"
shape = ["columns"]
kind = "weight"

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"
*/
/* A control: mean and variance by Welford's way, a square root of the compiler's.
 * task: layer_norm:rows=64,columns=500
 * expect: measured */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void layer_norm(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t rows = sizes[0], columns = sizes[1];
    const float *x = buffers[0], *gain = buffers[1], *shift = buffers[2];
    float *out = buffers[3];
    for (int64_t i = 0; i < rows; ++i, x += columns, out += columns) {
        float mean = 0, apart = 0;
        for (int64_t j = 0; j < columns; ++j) {
            const float from = x[j] - mean;
            mean += from / (j + 1);
            apart += from * (x[j] - mean);
        }
        const float scale = 1 / __builtin_sqrtf(apart / columns + 1e-5f);
        for (int64_t j = 0; j < columns; ++j) out[j] = (x[j] - mean) * scale * gain[j] + shift[j];
    }
}
