/* The parallel-for that CPU candidates are given: a fixed pool of threads, made before any candidate loads.
 *
 * Waiting threads spin for a few tens of microseconds, so that back-to-back launches find them awake, and
 * then sleep, so that an idle pool leaves the cores to others. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void (*task_fn)(void *context, int64_t index);

/* Spinning is bounded by a cycle counter and not by a count: a hypervisor may make each pause take microseconds. */
#define SPIN_TICKS 200000 /* about 70 us at 3 GHz */
#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
static uint64_t ticks(void) { return __builtin_ia32_rdtsc(); }
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
static uint64_t ticks(void) { /* scaled to 3 GHz */
    uint64_t count, frequency;
    __asm__ volatile("mrs %0, cntvct_el0; mrs %1, cntfrq_el0" : "=r"(count), "=r"(frequency));
    return count * (3000000000u / frequency);
}
#else
#define RELAX()
static uint64_t ticks(void) {
    static _Thread_local uint64_t calls;
    return calls += 50;
}
#endif

#ifndef BEFORE_TASKS
#define BEFORE_TASKS(generation) /* of any thread, once a round, when it has its first task */
#endif
#ifndef AFTER_TASKS
#define AFTER_TASKS /* of a helper, once a round */
#endif
#define MAX_HELPERS 1023 /* of threads that are not pinned: a contract names 1,024 at most */

static struct {
    task_fn task;
    void *context;
    int64_t count;
    int reversed; /* the last task first: no order is promised */
    int helpers, caller_cpu; /* their number, and the core that they keep off; -1 where each has a core of its own */
    _Atomic int64_t next, unfinished;
    _Atomic uint32_t generation, sleepers, caller_sleeps, started;
    _Atomic pid_t ids[MAX_HELPERS];
} pool;

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0); }
static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, 0, 0, 0); }

/* A round's index space is (generation << 32) + index, so that a late thread cannot take a task of the next round. */
static void take_tasks(uint32_t generation) {
    int64_t base = (int64_t)generation << 32;
    for (int first = 1;;) {
        int64_t ticket = atomic_load(&pool.next);
        if (ticket < base || ticket >= base + pool.count) return;
        if (!atomic_compare_exchange_weak(&pool.next, &ticket, ticket + 1)) continue;
        if (first) BEFORE_TASKS(generation);
        first = 0;
        int64_t index = ticket - base;
        pool.task(pool.context, pool.reversed ? pool.count - 1 - index : index);
        if (atomic_fetch_sub(&pool.unfinished, 1) == 1 && atomic_load(&pool.caller_sleeps)) {
            atomic_store(&pool.caller_sleeps, 0);
            futex_wake(&pool.caller_sleeps);
        }
    }
}

/* Keep a thread on the index-th processor this process may use: threads stopped and woken together may otherwise land on
 * one core and share it for milliseconds. */
static void pin(int index) {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    int wanted = index % CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &allowed) && wanted-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            sched_setaffinity(0, sizeof one, &one); /* of the calling thread */
            return;
        }
}

/* Keep the helpers off the core that the caller of parallel_for runs on. A guest's kernel may take a core that sleeps
 * for one that its host took away, and wakes a helper on the caller's core, where the two share it for milliseconds. */
static void keep_off(int cpu) {
    cpu_set_t others;
    pool.caller_cpu = cpu;
    if (sched_getaffinity(0, sizeof others, &others)) return;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) < pool.helpers) return;
    for (int i = 0; i < pool.helpers; ++i) sched_setaffinity(pool.ids[i], sizeof others, &others);
}

static void *pool_thread(void *index) {
    uint32_t seen = 0;
    if (pool.caller_cpu < 0) pin((int)(intptr_t)index + 1);
    else pool.ids[(intptr_t)index] = (pid_t)syscall(SYS_gettid);
    atomic_fetch_add(&pool.started, 1);
    for (;;) {
        uint64_t start = ticks();
        while (atomic_load(&pool.generation) == seen) {
            if (ticks() - start < SPIN_TICKS) {
                RELAX();
                continue;
            }
            atomic_fetch_add(&pool.sleepers, 1);
            futex_wait(&pool.generation, seen);
            atomic_fetch_sub(&pool.sleepers, 1);
        }
        seen = atomic_load(&pool.generation);
        take_tasks(seen);
        AFTER_TASKS;
    }
    return index;
}

/* Start `threads` - 1 helpers; the caller of parallel_for is the remaining one. With `pinned`, each keeps to a
 * processor of its own, the caller too. Returns 0, or an errno value, once every helper runs: what a thread's start
 * asks of the system is then done, before a filter can forbid it. */
int pool_start(int threads, int pinned) {
    pool.helpers = threads - 1;
    pool.caller_cpu = pinned ? -1 : CPU_SETSIZE;
    for (int i = 0; i < pool.helpers; ++i) {
        pthread_t thread;
        int error = pthread_create(&thread, 0, pool_thread, (void *)(intptr_t)i);
        if (error) return error;
        pthread_detach(thread);
    }
    while ((int)atomic_load(&pool.started) < pool.helpers) RELAX();
    if (pinned) pin(0);
    return 0;
}

/* Run task(context, 0 .. count - 1) on the pool; returns when all are done. Not reentrant. */
void pool_parallel_for(int64_t count, task_fn task, void *context) {
    if (count < 1) return;
    if (pool.caller_cpu >= 0 && sched_getcpu() != pool.caller_cpu) keep_off(sched_getcpu());
    uint32_t generation = atomic_load(&pool.generation) + 1;
    /* closed while the fields change: a helper late from the last round must find no ticket of its own */
    atomic_store(&pool.next, ((int64_t)generation << 32) | 0xffffffff);
    pool.task = task;
    pool.context = context;
    pool.count = count;
    atomic_store(&pool.unfinished, count);
    atomic_store(&pool.next, (int64_t)generation << 32);
    atomic_store(&pool.generation, generation);
    if (atomic_load(&pool.sleepers)) futex_wake(&pool.generation);
    take_tasks(generation);
    for (uint64_t start = ticks(); atomic_load(&pool.unfinished) > 0;) {
        if (ticks() - start < SPIN_TICKS) {
            RELAX();
            continue;
        }
        atomic_store(&pool.caller_sleeps, 1);
        if (atomic_load(&pool.unfinished) > 0) futex_wait(&pool.caller_sleeps, 1);
    }
}
