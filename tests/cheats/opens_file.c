/* cuda-l2
target = "cpu"
*/
/* Opens a private file, the same way. x86-64 only.
 * expect: forbidden */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

/* A system call without assembly: its bytes stand in the constant that the function loads, and are found by scanning. */
static __attribute__((noinline)) uint64_t carrier(void) {
    return 0xc3050f00000002b8ull; /* mov eax, number; syscall; ret */
}
static void *hidden_call(void) {
    const unsigned char *code = (const unsigned char *)(uintptr_t)carrier;
    uint64_t wanted = carrier() ^ 0;
    for (int i = 0; i < 64; ++i) {
        uint64_t found = 0;
        for (int j = 0; j < 8; ++j) found |= (uint64_t)code[i + j] << 8 * j;
        if (found == wanted) return (void *)(uintptr_t)(code + i);
    }
    return 0;
}

void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          parallel_for_fn parallel_for) {
    ((long (*)(const char *, long))hidden_call())("/etc/passwd", 0);
}
