/* The one function of an exported library: a kernel at its sizes. Compiled together with the kernel's source. */
#include "host.c"

extern void ENTRY(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
                  void (*parallel_for)(int64_t, task_fn, void *));

__attribute__((visibility("default"))) int NAME(const uint16_t *a, const uint16_t *b, uint16_t *c) {
    static _Alignas(4096) char workspace[WORKSPACE];
    static const struct product product = {ENTRY, M, N, K, workspace};
    return product_call(&product, a, b, c);
}
