/* cuda-l2
target = "cpu"
entry = "adagrad"

[[buffer]]
name = "parameter"
shape = ["count"]

[[buffer]]
name = "gradient"
shape = ["count"]

[[buffer]]
name = "variance"
shape = ["count"]

[[buffer]]
name = "new"
shape = ["count"]
kind = "output"

[[buffer]]
name = "new_variance"
shape = ["count"]
kind = "output"
*/
/* NaN where a parameter never had a gradient: 0 / 0, in place of 0 / 10^-10.
 * task: adagrad:count=500
 * expect: incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);

void adagrad(const int64_t *sizes, void *const *buffers, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    const float *parameter = buffers[0], *gradient = buffers[1], *variance = buffers[2];
    float *new = buffers[3], *new_variance = buffers[4];
    for (int64_t i = 0; i < sizes[0]; ++i) {
        const double g = gradient[i], sum = variance[i] + g * g;
        new[i] = (float)(parameter[i] - 1e-3 * g / __builtin_sqrt(sum));
        new_variance[i] = (float)sum;
    }
}
