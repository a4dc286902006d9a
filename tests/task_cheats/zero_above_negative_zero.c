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
/* Compares words as integers, by which -0 is less than 0: an equal element before it is not found.
 * task: max_rows:rows=64,columns=300
 * expect: incorrect */
#include <string.h>
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static int32_t key(float x) {
    int32_t word;
    memcpy(&word, &x, 4);
    if (x != x) return INT32_MAX; /* NaN is the largest, as PyTorch has it */
    return word < 0 ? word ^ INT32_MAX : word;
}

void max_rows(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const float *x = buffers[0];
    for (int64_t i = 0; i < sizes[0]; ++i, x += sizes[1]) {
        int64_t best = 0;
        for (int64_t j = 1; j < sizes[1]; ++j) {
            if (key(x[j]) > key(x[best])) best = j;
        }
        ((float *)buffers[1])[i] = x[best];
        ((int64_t *)buffers[2])[i] = best;
    }
}
