/* cuda-l2
target = "cuda"
arch = "sm_80"

[[workspace]]
name = "parts"
bytes = "4 * 4 * m * n"

[[workspace]]
name = "arrived"
bytes = "4 * cdiv(m, 16) * cdiv(n, 16)"
kind = "persistent"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)", 4]
block = [16, 16]
args = ["a", "b", "c", "parts", "arrived", "m", "n", "k"]
*/
/* A block counts itself as arrived, behind a fence, before it has written.
 * verify: full
 * expect: incorrect imprecise unhygienic crashed timed-out */
#include <cuda_fp16.h>

// Part blockIdx.z of four of the sum over K; the last block of a tile to arrive adds the parts and resets the counter.
extern "C" __global__ void gemm(const half *a, const half *b, half *c, float *parts, unsigned *arrived, int m, int n,
                                int k) {
  __shared__ unsigned before;
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x, z = blockIdx.z;
  const int i = row * n + column, all = m * n;
  const bool inside = row < m && column < n, first = threadIdx.x + threadIdx.y == 0;
  float sum = 0.0f;
  for (int p = k * z / 4; inside && p < k * (z + 1) / 4; p++)
    sum += __half2float(a[row * k + p]) * __half2float(b[p * n + column]);
  __threadfence();
  if (first) before = atomicAdd(&arrived[blockIdx.y * gridDim.x + blockIdx.x], 1u);
  if (inside) __stcg(&parts[z * all + i], sum);
  __syncthreads();
  if (before != 3) return;
  __threadfence();
  if (inside) {
    float total = 0.0f;
    for (int q = 0; q < 4; q++) total += __ldcg(&parts[q * all + i]);
    c[i] = __float2half(total);
  }
  if (first) arrived[blockIdx.y * gridDim.x + blockIdx.x] = 0;
}
