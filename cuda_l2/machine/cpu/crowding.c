/* Tells whether something else computes on a core's other hardware threads: multiply-adds that fill the vector units take
 * longer then, while a chain of multiplications, each of which waits for the one before, hardly does. Both follow the
 * clock, so that their ratio does not. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <time.h>

#if defined __AVX512F__
#define BYTES 64
#elif defined __AVX__
#define BYTES 32
#else
#define BYTES 16
#endif
typedef float vector __attribute__((vector_size(BYTES)));
enum { SUMS = 10, WIDE = 14000, CHAIN = 32000, TRIES = 4 }; /* some 25 us each */

static volatile float kept;
static volatile uint64_t product = 5;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static int64_t wide_ns(void) {
    vector sums[SUMS], factor = (vector){0} + 0.999f, step = (vector){0} + 0.001f;
    for (int i = 0; i < SUMS; ++i) sums[i] = (vector){0} + (float)i;
    const int64_t start = now_ns();
    for (int k = 0; k < WIDE; ++k)
#pragma GCC unroll 16
        for (int i = 0; i < SUMS; ++i) sums[i] = sums[i] * factor + step;
    for (int i = 0; i < SUMS; ++i) kept = sums[i][0];
    return now_ns() - start;
}

static int64_t chain_ns(void) {
    uint64_t x = product;
    const int64_t start = now_ns();
#pragma GCC unroll 16
    for (int k = 0; k < CHAIN; ++k) {
        x *= 5;
        __asm__ volatile("" : "+r"(x)); /* or five multiplications become one */
    }
    product = x;
    return now_ns() - start;
}

/* The least time of the former over the least of the latter, on one core; 0 where this thread cannot go there. */
double crowding(int core) {
    cpu_set_t before, one;
    int64_t wide = INT64_MAX, chain = INT64_MAX;
    if (sched_getaffinity(0, sizeof before, &before)) return 0;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    if (sched_setaffinity(0, sizeof one, &one)) return 0;
    for (int i = 0; i < TRIES; ++i) { /* none of a try's time is another program's where one of them is not stopped */
        const int64_t wide_now = wide_ns(), chain_now = chain_ns();
        wide = wide_now < wide ? wide_now : wide;
        chain = chain_now < chain ? chain_now : chain;
    }
    sched_setaffinity(0, sizeof before, &before);
    return (double)wide / (double)chain;
}
