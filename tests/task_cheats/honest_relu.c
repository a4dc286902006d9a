/* cuda-l2
target = "cpu"
entry = "relu"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"
*/
/* The control: NaN and infinities pass as they are.
 * task: relu:rows=17,columns=37
 * expect: measured */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void relu(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const float *x = buffers[0];
    float *out = buffers[1];
    for (int64_t i = 0; i < sizes[0] * sizes[1]; ++i) out[i] = x[i] < 0 ? 0 : x[i];
}
