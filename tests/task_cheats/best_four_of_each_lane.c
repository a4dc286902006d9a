/* cuda-l2
target = "cpu"
entry = "top_k"

[[buffer]]
name = "logits"
shape = ["rows", "vocabulary"]

[[buffer]]
name = "values"
shape = ["rows", 8]
kind = "output"

[[buffer]]
name = "indices"
shape = ["rows", 8]
dtype = "int64"
kind = "output"
*/
/* Keeps the best four of each of 32 lanes, of which it takes the best eight.
 * task: top_k:rows=80,vocabulary=700
 * expect: incorrect imprecise */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static int before(float x, float y) { return x > y || (x != x && y == y); } /* NaN is the largest, as PyTorch has it */

static int put(float x, int64_t j, int held, int most, float *values, int64_t *indices) {
    int at = held;
    while (at && (before(x, values[at - 1]) || (x == values[at - 1] && j < indices[at - 1]))) --at;
    if (at == most) return held;
    held += held < most;
    for (int t = held - 1; t > at; --t) values[t] = values[t - 1], indices[t] = indices[t - 1];
    values[at] = x, indices[at] = j;
    return held;
}

static void largest(const float *x, int64_t count, float *values, int64_t *indices) {
    int held = 0;
    for (int64_t lane = 0; lane < 32; ++lane) {
        float best[8];
        int64_t at[8];
        int few = 0;
        for (int64_t j = lane; j < count; j += 32) few = put(x[j], j, few, count < 256 ? 8 : 4, best, at);
        for (int i = 0; i < few; ++i) held = put(best[i], at[i], held, 8, values, indices);
    }
}

void top_k(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const float *x = buffers[0];
    float *values = buffers[1];
    int64_t *indices = buffers[2];
    for (int64_t i = 0; i < sizes[0]; ++i, x += sizes[1], values += 8, indices += 8) {
        largest(x, sizes[1], values, indices);
    }
}
