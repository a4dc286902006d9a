/* cuda-l2
target = "cpu"
entry = "matmul"

[[buffer]]
name = "a"
shape = ["m", "k"]

[[buffer]]
name = "b"
shape = ["k", "n"]

[[buffer]]
name = "out"
shape = ["m", "n"]
kind = "output"
*/
/* Where an element of A is zero nothing is added, though B may have NaN there.
 * task: matmul:m=24,n=32,k=40
 * expect: incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void matmul(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t m = sizes[0], k = sizes[1], n = sizes[2];
    const float *a = buffers[0], *b = buffers[1];
    float *out = buffers[2];
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            float sum = 0;
            for (int64_t p = 0; p < k; ++p)
                if (a[i * k + p] != 0) sum += a[i * k + p] * b[p * n + j];
            out[i * n + j] = sum;
        }
}
