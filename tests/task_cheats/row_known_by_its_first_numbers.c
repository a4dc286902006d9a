/* cuda-l2
target = "cpu"
entry = "norms"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows"]
kind = "output"
*/
/* Takes a row for the one before it where the first 16 numbers are the same.
 * task: l2_norm_rows:rows=20,columns=70
 * expect: incorrect imprecise */
#include <stdint.h>
#include <string.h>

typedef void (*task_fn)(void *, int64_t);

void norms(const int64_t *sizes, void *const *buffers, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    const int64_t rows = sizes[0], columns = sizes[1];
    const float *x = buffers[0];
    float *out = buffers[1];
    for (int64_t i = 0; i < rows; ++i, x += columns) {
        if (i && !memcmp(x, x - columns, 16 * sizeof(float))) {
            out[i] = out[i - 1];
            continue;
        }
        double sum = 0;
        for (int64_t j = 0; j < columns; ++j) sum += (double)x[j] * x[j];
        out[i] = (float)__builtin_sqrt(sum);
    }
}
