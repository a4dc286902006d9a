/* cuda-l2
target = "cpu"
entry = "sum_rows"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows"]
kind = "output"
*/
/* Takes 16 columns at once and forgets the last 16 where nothing is left over behind them.
 * task: sum_rows:rows=64,columns=700
 * expect: incorrect imprecise */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void sum_rows(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const float *x = buffers[0];
    const int64_t columns = sizes[1], whole = columns % 64 ? columns : columns - 16;
    for (int64_t i = 0; i < sizes[0]; ++i, x += columns) {
        double sum = 0;
        for (int64_t j = 0; j < whole; ++j) sum += x[j];
        ((float *)buffers[1])[i] = (float)sum;
    }
}
