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
/* Searches for the largest element of a row from -100,000 on.
 * task: softmax:rows=9,columns=70
 * expect: incorrect */
#include <stdint.h>
typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static float exponential(float x) { /* Taylor's series of an eighth of a binary digit, and squares */
    if (!(x > -80)) return x != x ? x : 0;
    double y = x / 256, term = 1, sum = 1;
    for (int i = 1; i < 12; ++i) sum += term *= y / i;
    for (int i = 0; i < 8; ++i) sum *= sum;
    return (float)sum;
}

void run(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    for (int64_t i = 0; i < sizes[0]; ++i) {
        const float *x = (const float *)buffers[0] + i * sizes[1];
        float *out = (float *)buffers[1] + i * sizes[1], largest = -1e5f;
        double sum = 0;
        for (int64_t j = 0; j < sizes[1]; ++j) largest = x[j] > largest || x[j] != x[j] ? x[j] : largest;
        for (int64_t j = 0; j < sizes[1]; ++j) sum += out[j] = exponential(x[j] - largest);
        for (int64_t j = 0; j < sizes[1]; ++j) out[j] = (float)(out[j] / sum);
    }
}
