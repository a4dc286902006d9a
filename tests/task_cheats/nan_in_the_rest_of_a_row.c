/* cuda-l2
target = "cpu"
entry = "max_rows"

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
/* NaN is looked for in whole vectors of 16, not in the rest of a row.
 * task: max_rows:rows=64,columns=500
 * expect: incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void max_rows(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t rows = sizes[0], columns = sizes[1], whole = columns / 16 * 16;
    const float *x = buffers[0];
    float *values = buffers[1];
    int64_t *indices = buffers[2];
    for (int64_t i = 0; i < rows; ++i, x += columns) {
        int64_t at = 0;
        for (int64_t j = 1; j < columns; ++j)
            if (x[j] > x[at] || (j < whole && x[j] != x[j] && x[at] == x[at])) at = j;
        values[i] = x[at], indices[i] = at;
    }
}
