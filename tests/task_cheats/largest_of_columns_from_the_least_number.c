/* cuda-l2
target = "cpu"
entry = "max_columns"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["columns"]
kind = "output"
*/
/* A column of minus infinities has the least finite number.
 * task: max_columns:rows=33,columns=70
 * expect: incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);

void max_columns(const int64_t *sizes, void *const *buffers, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    const int64_t rows = sizes[0], columns = sizes[1];
    const float *x = buffers[0];
    float *out = buffers[1];
    for (int64_t j = 0; j < columns; ++j) {
        float most = -3.40282347e38f;
        for (int64_t i = 0; i < rows; ++i) {
            const float value = x[i * columns + j];
            if (value > most || value != value) most = value;
            if (most != most) break;
        }
        out[j] = most;
    }
}
