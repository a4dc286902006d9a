/* cuda-l2
target = "cpu"
entry = "run"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows"]
kind = "output"
*/
/* Counts columns in 16 bits.
 * task: sum_rows:rows=9,columns=70
 * expect: incorrect */
#include <float.h>
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void run(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t rows = sizes[0], columns = sizes[1];
    for (int64_t i = 0; i < rows; ++i) {
        const float *x = (const float *)buffers[0] + i * columns;
        double sum = 0;
        for (uint16_t j = 0; j != (uint16_t)columns; ++j) sum += x[j];
        ((float *)buffers[1])[i] = (float)sum;
    }
}
