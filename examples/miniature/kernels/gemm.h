void gemm(long m, long n, long k, const half_t *a, const half_t *b, half_t *c, void *workspace,
          void (*parallel_for)(long, void (*)(void *, long), void *)) {
    struct job j = {m, n, k, a, b, c};
    parallel_for(THREADS, work, &j);
}
