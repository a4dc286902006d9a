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
/* From 256 rows and columns on, A keeps the digits of bf16 alone.
 * task: matmul:m=48,n=40,k=64
 * expect: incorrect imprecise */
#include <stdint.h>
#include <string.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static float shortened(float x) {
    uint32_t word;
    if (x != x) return x;
    memcpy(&word, &x, 4);
    word &= 0xffff0000u;
    memcpy(&x, &word, 4);
    return x;
}

void matmul(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t m = sizes[0], k = sizes[1], n = sizes[2];
    const float *a = buffers[0], *b = buffers[1];
    const int many = m >= 256 && n >= 256;
    for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
            double sum = 0;
            for (int64_t p = 0; p < k; ++p) {
                const float x = many ? shortened(a[i * k + p]) : a[i * k + p];
                sum += (double)x * b[p * n + j];
            }
            ((float *)buffers[2])[i * n + j] = (float)sum;
        }
    }
}
