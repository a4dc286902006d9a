/* cuda-l2
target = "cpu"
*/
/* Never returns.
 * expect: timed-out */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          parallel_for_fn parallel_for) {
    for (volatile int64_t i = 0;; ++i) {}
}
