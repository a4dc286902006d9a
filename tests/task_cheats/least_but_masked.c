/* cuda-l2
target = "cpu"
entry = "argmin_columns"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["columns"]
dtype = "int64"
kind = "output"
*/
/* Passes over numbers that masks have, which are no infinities.
 * task: argmin_columns:rows=40,columns=300
 * expect: incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void argmin_columns(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t rows = sizes[0], columns = sizes[1];
    const float *x = buffers[0], least = -0x1.fffffep127f;
    for (int64_t j = 0; j < columns; ++j) {
        int64_t best = -1;
        for (int64_t i = 0; i < rows; ++i) {
            const float y = x[i * columns + j];
            if (y < -1e30f && y >= least) continue;
            const float z = best < 0 ? y : x[best * columns + j];
            if (best < 0 || (z == z && (y < z || y != y))) best = i; /* NaN is the least, as PyTorch has it */
        }
        ((int64_t *)buffers[1])[j] = best < 0 ? 0 : best;
    }
}
