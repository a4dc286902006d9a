/* Kernels that add up a term of every element of one or two tensors: sums and mean losses.
 *
 * Set from outside: OPERATION (below), DTYPE, VEC (elements a load), ITEMS (vectors a thread has in flight), THREADS, TAIL (who
 * adds up what blocks found: 0 a second launch, 1 the block that ends last), LOAD, QUICK.
 *
 * TERM is one element's, of x and y, floats; RESULT what becomes of the total of `count` terms. */
#include "gpu_task.cuh"
#include "gpu_total.cuh"

#ifndef OPERATION
#define OPERATION 0
#endif
#ifndef VEC
#define VEC 4
#endif
#ifndef ITEMS
#define ITEMS 4
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef TAIL
#define TAIL 0
#endif

#if OPERATION == 0 /* sum_all */
#define INPUTS 1
#define TERM x
#define RESULT total
#elif OPERATION == 1 /* mse */
#define TERM (x - y) * (x - y)
#elif OPERATION == 2 /* huber */
#define TERM huber(fabsf(x - y))
#elif OPERATION == 3 /* binary_cross_entropy of logits */
#define SECOND unsigned char
#define TERM softplus(y != 0 ? -x : x, exponential(-fabsf(x)))
#elif OPERATION == 4 /* focal */
#define SECOND unsigned char
#define TERM focal(y != 0 ? -x : x, exponential(-fabsf(x)), y != 0 ? 0.25f : 0.75f)
#elif OPERATION == 5 /* hinge */
#define SECOND unsigned char
#define TERM hinge(y != 0 ? 1 - x : 1 + x)
#endif
#ifndef INPUTS
#define INPUTS 2
#endif
#ifndef SECOND
#define SECOND real
#endif
#ifndef RESULT
#define RESULT total / count
#endif

DEVICE float huber(float distance) { return distance < 1 ? 0.5f * distance * distance : distance - 0.5f; }
DEVICE float hinge(float x) { return x < 0 ? 0 : x; }
/* ln(1 + e^u); e is e^-|u|. */
DEVICE float softplus(float u, float e) { return (u < 0 ? 0 : u) + log1pf(e); }
DEVICE float focal(float u, float e, float alpha) {
  const float missed = quotient(u < 0 ? e : 1, 1 + e);
  return alpha * missed * missed * softplus(u, e);
}

struct Packs {
  Pack<real, VEC> x;
  Pack<SECOND, VEC> y;
};
DEVICE float term(float x, float y) {
  (void)y;
  return TERM;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    partial(const real *x, const SECOND *y, float *of_blocks, unsigned *ended, real *result, long long count) {
  const long long vectors = count / VEC, step = (long long)gridDim.x * THREADS * ITEMS;
  float sums[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) sums[i] = 0;
  for (long long first = (long long)blockIdx.x * THREADS * ITEMS + threadIdx.x; first < vectors; first += step) {
    Packs p[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * THREADS < vectors) {
        p[i].x = read_once<VEC>(x + (first + i * THREADS) * VEC);
        if (INPUTS > 1) p[i].y = read_once<VEC>(y + (first + i * THREADS) * VEC);
      }
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * THREADS < vectors)
#pragma unroll
        for (int k = 0; k < VEC; k++) sums[i] += term(widened(p[i].x.at[k]), INPUTS > 1 ? widened(p[i].y.at[k]) : 0);
  }
  float sum = sums[0];
#pragma unroll
  for (int i = 1; i < ITEMS; i++) sum += sums[i];
  if (blockIdx.x == 0 && vectors * VEC + threadIdx.x < count) { /* what no whole vector holds */
    const long long at = vectors * VEC + threadIdx.x;
    sum += term(widened(x[at]), INPUTS > 1 ? widened(y[at]) : 0);
  }
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) of_blocks[blockIdx.x] = sum;
#if TAIL
  if (last_block(ended)) {
    const float total = sum_of(of_blocks, gridDim.x);
    if (threadIdx.x == 0) *result = narrowed(RESULT);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(1024)
    add_up(const float *of_blocks, real *result, int blocks, long long count) {
  const float total = sum_of(of_blocks, blocks);
  if (threadIdx.x == 0) *result = narrowed(RESULT);
}
