/* Has two cores hand one cache line to and fro, which takes as long as their caches are apart. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

static _Atomic int turn;
static int turns;

static void *answer(void *unused) {
    for (int i = 1; i < 2 * turns; i += 2) {
        while (atomic_load(&turn) != i) {}
        atomic_store(&turn, i + 1);
    }
    return unused;
}

/* Returns when the line has come back `count` times, or an errno value. Not reentrant. */
int exchange(int here, int there, int count) {
    cpu_set_t before, one;
    pthread_attr_t attributes;
    pthread_t thread;
    turns = count;
    atomic_store(&turn, 0);
    pthread_attr_init(&attributes);
    CPU_ZERO(&one);
    CPU_SET(there, &one);
    pthread_attr_setaffinity_np(&attributes, sizeof one, &one); /* it must not begin on this thread's core */
    sched_getaffinity(0, sizeof before, &before);
    CPU_ZERO(&one);
    CPU_SET(here, &one);
    sched_setaffinity(0, sizeof one, &one);
    int error = pthread_create(&thread, &attributes, answer, 0);
    for (int i = 0; !error && i < 2 * count; i += 2) {
        atomic_store(&turn, i + 1);
        while (atomic_load(&turn) != i + 2) {}
    }
    if (!error) pthread_join(thread, 0);
    sched_setaffinity(0, sizeof before, &before);
    pthread_attr_destroy(&attributes);
    return error;
}
