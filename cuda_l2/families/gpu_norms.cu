/* Kernels over several tensors that first need a norm of all: gradient clipping, LAMB.
 *
 * Set from outside: OPERATION (below), VEC (elements a load), ITEMS (vectors a thread has in flight), THREADS, BACKWARDS (1: the
 * second reading begins where the first ended, at what the second-level cache still holds), LOAD, STORE.
 *
 * Two launches of the same blocks: `measure` leaves sums of squares of every block in a workspace, `apply` adds them up in
 * every block, in one order. clip_gradient_value needs none and is `apply` alone. */
#include "gpu_task.cuh"
#include "gpu_total.cuh"

#ifndef OPERATION
#define OPERATION 0
#endif
#ifndef VEC
#define VEC 4
#endif
#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef BACKWARDS
#define BACKWARDS 0
#endif

#define CLIP_NORM 0
#define CLIP_VALUE 1
#define LAMB 2

/* Calls work(first, vectors) once a round: this thread has the vectors first + i THREADS below `vectors`, i below ITEMS. */
template <typename Work>
DEVICE void share(long long count, bool backwards, const Work &work) {
  const long long vectors = count / VEC, step = (long long)gridDim.x * THREADS * ITEMS;
  const long long rounds = (vectors + step - 1) / step;
  for (long long i = 0; i < rounds; i++) {
    const long long first = (backwards ? rounds - 1 - i : i) * step + (long long)blockIdx.x * THREADS * ITEMS + threadIdx.x;
    work(first, vectors);
  }
}

#if OPERATION == LAMB /* the first launch writes the moments, the second reads them back */
struct Step {
  Pack<float, VEC> parameter, gradient, momentum, variance;
};
DEVICE float update(float parameter, float first, float second) {
  return first / (sqrtf(second) + 1e-6f) + 0.01f * parameter;
}
DEVICE void moments(float gradient, float &first, float &second) {
  first = 0.9f * first + 0.1f * gradient, second = 0.999f * second + 0.001f * (gradient * gradient);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    measure(const float *parameter, const float *gradient, const float *momentum, const float *variance,
            float *new_momentum, float *new_variance, float *of_blocks, long long count) {
  float of_parameter = 0, of_update = 0;
  share(count, false, [&](long long first, long long vectors) {
    Step steps[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * THREADS < vectors) {
        const long long at = (first + i * THREADS) * VEC;
        steps[i].parameter = read<VEC>(parameter + at), steps[i].gradient = read_once<VEC>(gradient + at);
        steps[i].momentum = read_once<VEC>(momentum + at), steps[i].variance = read_once<VEC>(variance + at);
      }
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * THREADS < vectors) {
        const long long at = (first + i * THREADS) * VEC;
        Step &s = steps[i];
#pragma unroll
        for (int k = 0; k < VEC; k++) {
          moments(s.gradient.at[k], s.momentum.at[k], s.variance.at[k]);
          const float u = update(s.parameter.at[k], s.momentum.at[k], s.variance.at[k]);
          of_parameter += s.parameter.at[k] * s.parameter.at[k], of_update += u * u;
        }
        *(Pack<float, VEC> *)(new_momentum + at) = s.momentum, *(Pack<float, VEC> *)(new_variance + at) = s.variance;
      }
  });
  const long long at = count / VEC * VEC + threadIdx.x;
  if (blockIdx.x == 0 && at < count) {
    float first = momentum[at], second = variance[at];
    moments(gradient[at], first, second);
    new_momentum[at] = first, new_variance[at] = second;
    const float p = parameter[at], u = update(p, first, second);
    of_parameter += p * p, of_update += u * u;
  }
  of_parameter = sum_over_block(of_parameter), of_update = sum_over_block(of_update);
  if (threadIdx.x == 0) of_blocks[blockIdx.x] = of_parameter, of_blocks[gridDim.x + blockIdx.x] = of_update;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    apply(const float *parameter, const float *new_momentum, const float *new_variance, float *out,
          const float *of_blocks, int blocks, long long count) {
  const float of_parameter = sqrtf(sum_of(of_blocks, blocks)), of_update = sqrtf(sum_of(of_blocks + blocks, blocks));
  const float rate = 1e-3f * (of_parameter / (of_update + 1e-6f));
  share(count, BACKWARDS, [&](long long first, long long vectors) {
    Step steps[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * THREADS < vectors) {
        const long long at = (first + i * THREADS) * VEC;
        steps[i].parameter = read_once<VEC>(parameter + at);
        steps[i].momentum = read_once<VEC>(new_momentum + at), steps[i].variance = read_once<VEC>(new_variance + at);
      }
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * THREADS < vectors) {
        Pack<float, VEC> p = steps[i].parameter;
#pragma unroll
        for (int k = 0; k < VEC; k++)
          p.at[k] -= rate * update(p.at[k], steps[i].momentum.at[k], steps[i].variance.at[k]);
        write<VEC>(out + (first + i * THREADS) * VEC, p);
      }
  });
  const long long at = count / VEC * VEC + threadIdx.x;
  if (blockIdx.x == 0 && at < count)
    out[at] = parameter[at] - rate * update(parameter[at], new_momentum[at], new_variance[at]);
}
#else

#if OPERATION == CLIP_NORM
extern "C" __global__ void __launch_bounds__(THREADS)
    measure(const float *a, const float *b, const float *c, float *of_blocks, long long small, long long middle,
            long long large) {
  float sums[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) sums[i] = 0;
#pragma unroll 1
  for (int tensor = 0; tensor < 3; tensor++) {
    const float *x = tensor == 0 ? a : tensor == 1 ? b : c;
    const long long count = tensor == 0 ? small : tensor == 1 ? middle : large;
    share(count, false, [&](long long first, long long vectors) {
      Pack<float, VEC> p[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (first + i * THREADS < vectors) p[i] = read<VEC>(x + (first + i * THREADS) * VEC);
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (first + i * THREADS < vectors)
#pragma unroll
          for (int k = 0; k < VEC; k++) sums[i] += p[i].at[k] * p[i].at[k];
    });
    const long long at = count / VEC * VEC + threadIdx.x;
    if (blockIdx.x == 0 && at < count) sums[0] += x[at] * x[at];
  }
  float sum = sums[0];
#pragma unroll
  for (int i = 1; i < ITEMS; i++) sum += sums[i];
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) of_blocks[blockIdx.x] = sum;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    apply(const float *a, const float *b, const float *c, float *new_a, float *new_b, float *new_c,
          const float *of_blocks, int blocks, long long small, long long middle, long long large) {
#if OPERATION == CLIP_NORM
  const float wanted = 1 / (sqrtf(sum_of(of_blocks, blocks)) + 1e-6f), factor = wanted > 1 ? 1 : wanted;
  const auto limited = [&](float x) { return x * factor; };
#else
  const auto limited = [](float x) { return clipped(x, -0.5f, 0.5f); };
#endif
#pragma unroll 1
  for (int i = 0; i < 3; i++) {
    const int tensor = BACKWARDS ? 2 - i : i;
    const float *x = tensor == 0 ? a : tensor == 1 ? b : c;
    float *out = tensor == 0 ? new_a : tensor == 1 ? new_b : new_c;
    const long long count = tensor == 0 ? small : tensor == 1 ? middle : large;
    share(count, BACKWARDS, [&](long long first, long long vectors) {
      Pack<float, VEC> p[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (first + i * THREADS < vectors) p[i] = read_once<VEC>(x + (first + i * THREADS) * VEC);
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (first + i * THREADS < vectors) {
#pragma unroll
          for (int k = 0; k < VEC; k++) p[i].at[k] = limited(p[i].at[k]);
          write<VEC>(out + (first + i * THREADS) * VEC, p[i]);
        }
    });
    const long long at = count / VEC * VEC + threadIdx.x;
    if (blockIdx.x == 0 && at < count) out[at] = limited(x[at]);
  }
}
#endif
