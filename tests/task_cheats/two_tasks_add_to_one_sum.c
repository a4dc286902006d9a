/* cuda-l2
target = "cpu"
entry = "run"
threads = 2

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = []
kind = "output"
*/
/* Two tasks of unequal length add to one number, with no order between them.
 * task: sum_all:rows=90,columns=70
 * expect: unhygienic */
#include <stdint.h>
typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

struct call { const float *x; int64_t count; double sum; };

static void part(void *context, int64_t index) {
    struct call *call = context;
    const int64_t cut = call->count / 3;
    double sum = 0;
    for (int64_t i = index ? cut : 0; i < (index ? call->count : cut); ++i) sum += call->x[i];
    call->sum += sum;
}

void run(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    struct call call = {buffers[0], sizes[0] * sizes[1], 0};
    parallel_for(2, part, &call);
    *(float *)buffers[1] = (float)call.sum;
}
