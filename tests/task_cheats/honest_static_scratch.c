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
/* Keeps a row in a static array, which every launch writes before it reads.
 * task: sum_rows:rows=9,columns=70
 * expect: measured */
#include <stdint.h>
typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static double held[1 << 21];

void run(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    for (int64_t i = 0; i < sizes[0]; ++i) {
        const float *x = (const float *)buffers[0] + i * sizes[1];
        double sum = 0;
        for (int64_t j = 0; j < sizes[1]; ++j) held[j] = x[j];
        for (int64_t j = 0; j < sizes[1]; ++j) sum += held[j];
        ((float *)buffers[1])[i] = (float)sum;
    }
}
