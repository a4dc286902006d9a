/* cuda-l2
target = "cpu"
entry = "variance_rows"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows"]
kind = "output"
*/
/* The mean of squares less the squared mean, in sixteen sums each, unless next to nothing is left: few digits are right.
 * task: variance_rows:rows=33,columns=100
 * expect: imprecise incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void variance_rows(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t rows = sizes[0], columns = sizes[1];
    const float *x = buffers[0];
    float *out = buffers[1];
    for (int64_t i = 0; i < rows; ++i, x += columns) {
        float sums[16] = {0}, squares[16] = {0}, apart = 0;
        for (int64_t j = 0; j < columns; ++j) sums[j % 16] += x[j], squares[j % 16] += x[j] * x[j];
        for (int half = 8; half; half /= 2)
            for (int t = 0; t < half; ++t) sums[t] += sums[t + half], squares[t] += squares[t + half];
        const float mean = sums[0] / columns, left = squares[0] / columns - mean * mean;
        for (int64_t j = 0; j < columns; ++j) apart += (x[j] - mean) * (x[j] - mean);
        out[i] = (left > 0x1p-20f * mean * mean ? left * columns : apart) / (columns - 1);
    }
}
