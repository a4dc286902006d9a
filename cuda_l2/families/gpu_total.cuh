#pragma once
/* Sums over blocks, in an order that does not depend on when they end. */
#include "gpu_ptx.cuh"

/* The sum over the threads of a block of whole warps, in every thread. */
DEVICE float sum_over_block(float sum) {
  __shared__ float sums[32];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  if (blockDim.x == 32) return sum;
  __syncthreads(); /* an earlier sum has been read */
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < (int)blockDim.x / 32; i++) sum += sums[i];
  return sum;
}

/* The sum of numbers that other blocks or launches wrote, in every thread. */
DEVICE float sum_of(const float *numbers, int count) {
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += __ldcg(numbers + i);
  return sum_over_block(sum);
}

/* Whether all other blocks of `blocks` have come here, with what they wrote before to be seen. `ended` begins at 0 and ends so. */
DEVICE bool last_block(unsigned *ended, unsigned blocks = gridDim.x) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(ended, blocks - 1) == blocks - 1;
  __syncthreads();
  __threadfence();
  return last;
}
