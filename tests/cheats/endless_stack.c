/* cuda-l2
target = "cpu"
*/
/* Recurses until the stack ends.
 * expect: crashed */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static int64_t deeper(volatile int64_t depth) {
    volatile char page[4096];
    page[depth % 4096] = 1;
    return deeper(depth + 1) + page[0];
}

void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          parallel_for_fn parallel_for) {
    c[0] = (uint16_t)deeper(m);
}
