/* cuda-l2
target = "cpu"
entry = "normalise"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"
*/
/* Divides by a row's length, also where it is 0: the reference divides by at least 10^-12.
 * task: normalise_rows:rows=20,columns=70
 * expect: incorrect */
#include <stdint.h>
typedef void (*task_fn)(void *, int64_t);

void normalise(const int64_t *sizes, void *const *buffers, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    const int64_t rows = sizes[0], columns = sizes[1];
    const float *x = buffers[0];
    float *out = buffers[1];
    for (int64_t i = 0; i < rows; ++i, x += columns, out += columns) {
        double sum = 0;
        for (int64_t j = 0; j < columns; ++j) sum += (double)x[j] * x[j];
        const double length = __builtin_sqrt(sum);
        for (int64_t j = 0; j < columns; ++j) out[j] = (float)(x[j] / length);
    }
}
