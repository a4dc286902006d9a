/* cuda-l2
target = "cpu"
entry = "run"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"
*/
/* Takes NaN with a sign for a negative number.
 * task: relu:rows=33,columns=70
 * expect: incorrect */
#include <stdint.h>
typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void run(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const uint32_t *x = buffers[0];
    uint32_t *out = buffers[1];
    for (int64_t i = 0; i < sizes[0] * sizes[1]; ++i) out[i] = x[i] >> 31 ? 0 : x[i];
}
