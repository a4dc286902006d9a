/* The two ceilings of a CPU: fused multiply-adds in registers, with PAIRS those of pairs of bf16, and reading memory
 * larger than the caches. Prints GFLOP/s and GB/s. usage: cpu_peak THREADS */
#include "pool.c"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512F__)
#define VW 16
#define CHAINS 24
#elif defined(__AVX__)
#define VW 8
#define CHAINS 12
#else
#define VW 4
#define CHAINS 12
#endif
#define STEPS 2000000
#define READ_BYTES (96 << 20)

typedef float vf __attribute__((vector_size(VW * 4)));
#ifdef PAIRS
#include <immintrin.h>
#define FLOPS 4
#define MULTIPLY_ADD(sum, x, y) (vf)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(x), (__m512bh)(y))
#else
#define FLOPS 2
#define MULTIPLY_ADD(sum, x, y) (sum) + (x) * (y)
#endif
static unsigned char *memory;
static int threads;
static volatile float sink;
#if defined(__x86_64__)
#define REGISTER "+v"
#else
#define REGISTER "+w"
#endif

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void multiply_add(void *context, int64_t index) {
    const float *start = context;
    vf sum[CHAINS], x, y;
    for (int lane = 0; lane < VW; ++lane) x[lane] = start[lane], y[lane] = start[VW + lane];
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; ++i) sum[i] = x + (float)i;
    for (int64_t step = 0; step < STEPS; ++step) {
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; ++i) {
            sum[i] = MULTIPLY_ADD(sum[i], x, y);
            __asm__ volatile("" : REGISTER(sum[i])); /* keep the chain: without it the sum has a closed form */
        }
    }
    vf total = sum[0];
#pragma GCC unroll 24
    for (int i = 1; i < CHAINS; ++i) total += sum[i];
    sink = total[index % VW];
}

static void read_memory(void *context, int64_t index) {
    (void)context;
    size_t share = READ_BYTES / threads / sizeof(vf);
    const vf *p = (const vf *)memory + share * index;
    vf total[4] = {{0}};
    for (size_t i = 0; i + 4 <= share; i += 4)
        for (int j = 0; j < 4; ++j) total[j] += p[i + j];
    sink = (total[0] + total[1] + total[2] + total[3])[0];
}

int main(int argc, char **argv) {
    threads = argc > 1 ? atoi(argv[1]) : 1;
    float start[2 * VW];
    for (int i = 0; i < 2 * VW; ++i) start[i] = 1e-3f * (float)(i + argc);
    memory = aligned_alloc(64, READ_BYTES);
    if (!memory || pool_start(threads, 1)) return 1;
    memset(memory, 0, READ_BYTES);
    double flops = 0, bytes = 0;
    for (int trial = 0; trial < 5; ++trial) {
        double t0 = now();
        pool_parallel_for(threads, multiply_add, start);
        double t1 = now();
        pool_parallel_for(threads, read_memory, 0);
        double t2 = now();
        double f = (double)FLOPS * VW * CHAINS * STEPS * threads / (t1 - t0), b = READ_BYTES / (t2 - t1);
        flops = f > flops ? f : flops;
        bytes = b > bytes ? b : bytes;
    }
    printf("%.2f %.2f\n", flops * 1e-9, bytes * 1e-9);
    return 0;
}
