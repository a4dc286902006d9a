/* cuda-l2
target = "cpu"
entry = "run"

[[buffer]]
name = "x"
shape = ["rows", "columns"]
dtype = "float16"

[[buffer]]
name = "out"
shape = ["rows", "columns"]
dtype = "float16"
kind = "output"
*/
/* Looks all numbers up in a static table, which the first launch makes for all others.
 * task: relu:rows=33,columns=70:float16
 * expect: unhygienic */
#include <stdint.h>
typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static uint16_t table[1 << 16];
static int ready;

void run(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const uint16_t *x = buffers[0];
    uint16_t *out = buffers[1];
    for (int i = 0; !ready && i < 1 << 16; ++i) table[i] = i < 0x8000 || i > 0xfc00 ? i : 0;
    ready = 1;
    for (int64_t i = 0; i < sizes[0] * sizes[1]; ++i) out[i] = table[x[i]];
}
