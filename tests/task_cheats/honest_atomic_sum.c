/* cuda-l2
target = "cpu"
entry = "run"
threads = 2

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows"]
dtype = "int64"
kind = "output"
*/
/* Tasks add whole numbers to those of all rows at once, atomically.
 * task: count_positive:rows=9,columns=70
 * expect: measured */
#include <stdint.h>
typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

struct call { const float *x; int64_t *out, rows, columns; };

static void part(void *context, int64_t index) {
    const struct call *call = context;
    const int64_t half = call->columns / 2;
    for (int64_t i = 0; i < call->rows; ++i) {
        int64_t count = 0;
        for (int64_t j = index ? half : 0; j < (index ? call->columns : half); ++j) count += call->x[i * call->columns + j] > 0;
        __atomic_fetch_add(&call->out[i], count, __ATOMIC_RELAXED);
    }
}

void run(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    struct call call = {buffers[0], buffers[1], sizes[0], sizes[1]};
    for (int64_t i = 0; i < sizes[0]; ++i) call.out[i] = 0;
    parallel_for(2, part, &call);
}
