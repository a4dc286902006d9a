/* Runs CPU kernels in a process that is not ours: threads, turns, and what a fork leaves of both.
 *
 * Compiled once for each number of threads (POOL_THREADS), since a pool's state is static. */
#include "../machine/cpu/pool.c"
#include <string.h>

typedef void (*gemm_fn)(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c,
                        void *workspace, void (*parallel_for)(int64_t, task_fn, void *));

/* One kernel at its sizes, with its scratch memory. */
struct product {
    gemm_fn entry;
    int64_t m, n, k;
    void *workspace;
};

/* The pool serves one kernel at a time. */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static int pool_runs, forks_seen;

static void before_fork(void) { pthread_mutex_lock(&turn); }
static void after_fork(void) { pthread_mutex_unlock(&turn); }

/* A forked child has none of its parent's threads: the next call starts new ones. */
static void in_child(void) {
    memset(&pool, 0, sizeof pool);
    pool_runs = 0;
    pthread_mutex_unlock(&turn);
}

static int start(void) {
    int error = forks_seen ? 0 : pthread_atfork(before_fork, after_fork, in_child);
    if (error) return error;
    forks_seen = 1;
    error = pool_start(POOL_THREADS, 0); /* not pinned: the process and its cores are the caller's */
    pool_runs = !error;
    return error;
}

/* C = A B; 0, or the errno value with which the pool's threads cannot be started. */
int product_call(const struct product *product, const void *a, const void *b, void *c) {
    int error = 0;
    pthread_mutex_lock(&turn);
    if (!pool_runs) error = start();
    if (!error)
        product->entry(product->m, product->n, product->k, a, b, c, product->workspace, pool_parallel_for);
    pthread_mutex_unlock(&turn);
    return error;
}

/* The same call many times over, without what surrounds it: what the kernel alone takes. */
void product_repeat(const struct product *product, const void *a, const void *b, void *c, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        product->entry(product->m, product->n, product->k, a, b, c, product->workspace, pool_parallel_for);
}

/* A kernel that computes nothing, to measure what a call costs. */
void product_empty(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
                   void (*parallel_for)(int64_t, task_fn, void *)) {}
