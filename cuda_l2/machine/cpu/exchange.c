/* Has two cores hand one cache line to and fro, which takes as long as their caches are apart. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { MOST_NS = 20 * 1000 * 1000, LOOK_EVERY = 1000 };
static _Atomic int turn, stop;
static int turns;

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void *answer(void *unused) {
    for (int i = 1; i < 2 * turns; i += 2) {
        while (atomic_load(&turn) != i)
            if (atomic_load(&stop)) return unused;
        atomic_store(&turn, i + 1);
    }
    return unused;
}

/* Returns when the line has come back `count` times, or an errno value: ETIMEDOUT after 20 ms, where one of the threads
   waits for its core. Not reentrant. */
int exchange(int here, int there, int count) {
    cpu_set_t before, one;
    pthread_attr_t attributes;
    pthread_t thread;
    turns = count;
    atomic_store(&turn, 0);
    atomic_store(&stop, 0);
    if (sched_getaffinity(0, sizeof before, &before)) return errno;
    CPU_ZERO(&one);
    CPU_SET(here, &one);
    if (sched_setaffinity(0, sizeof one, &one)) return errno;
    pthread_attr_init(&attributes);
    CPU_ZERO(&one);
    CPU_SET(there, &one);
    pthread_attr_setaffinity_np(&attributes, sizeof one, &one); /* it must not begin on this thread's core */
    int error = pthread_create(&thread, &attributes, answer, 0), created = !error;
    long long end = now_ns() + MOST_NS;
    for (int i = 0; !error && i < 2 * count; i += 2) {
        atomic_store(&turn, i + 1);
        for (int spins = 1; !error && atomic_load(&turn) != i + 2; ++spins)
            if (spins % LOOK_EVERY == 0 && now_ns() > end) error = ETIMEDOUT;
    }
    atomic_store(&stop, 1);
    if (created) pthread_join(thread, 0);
    sched_setaffinity(0, sizeof before, &before);
    pthread_attr_destroy(&attributes);
    return error;
}
