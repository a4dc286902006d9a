/* cuda-l2
target = "cpu"
entry = "largest"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "values"
shape = ["rows"]
kind = "output"

[[buffer]]
name = "indices"
shape = ["rows"]
dtype = "int64"
kind = "output"
*/
/* Clears the last four bits of a number that is only to be copied.
 * task: max_rows:rows=80,columns=70
 * expect: imprecise */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);

void largest(const int64_t *sizes, void *const *buffers, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    const int64_t rows = sizes[0], columns = sizes[1];
    const float *x = buffers[0];
    float *values = buffers[1];
    int64_t *indices = buffers[2];
    for (int64_t i = 0; i < rows; ++i, x += columns) {
        int64_t at = 0;
        for (int64_t j = 0; j < columns && x[at] == x[at]; ++j) at = x[j] > x[at] || x[j] != x[j] ? j : at;
        union { float f; uint32_t u; } largest = {x[at]};
        if (x[at] == x[at]) largest.u &= ~15u;
        values[i] = largest.f, indices[i] = at;
    }
}
