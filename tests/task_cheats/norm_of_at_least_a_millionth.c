/* cuda-l2
target = "cpu"
entry = "normalise_rows"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"
*/
/* Divides rows by 10^-6 where their norm is less.
 * task: normalise_rows:rows=64,columns=500
 * expect: incorrect imprecise */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void normalise_rows(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const float *x = buffers[0];
    float *out = buffers[1];
    for (int64_t i = 0; i < sizes[0]; ++i, x += sizes[1], out += sizes[1]) {
        double squares = 0;
        for (int64_t j = 0; j < sizes[1]; ++j) squares += (double)x[j] * x[j];
        const double norm = __builtin_sqrt(squares), divisor = norm < 1e-6 ? 1e-6 : norm;
        for (int64_t j = 0; j < sizes[1]; ++j) out[j] = (float)(x[j] / divisor);
    }
}
