/* cuda-l2
target = "cpu"
entry = "run"

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
/* A maximum that begins at the least finite number.
 * task: max_rows:rows=9,columns=70
 * expect: incorrect */
#include <float.h>
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void run(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t rows = sizes[0], columns = sizes[1];
    for (int64_t i = 0; i < rows; ++i) {
        const float *x = (const float *)buffers[0] + i * columns;
        float most = -FLT_MAX;
        int64_t at = 0;
        for (int64_t j = 0; j < columns && most == most; ++j)
            if (!(x[j] <= most)) most = x[j], at = j;
        ((float *)buffers[1])[i] = most;
        ((int64_t *)buffers[2])[i] = at;
    }
}
