/* cuda-l2
target = "cuda"
arch = "sm_80"

[[workspace]]
name = "arrived"
bytes = 4
kind = "persistent"

[[launch]]
kernel = "gemm"
grid = ["64 * sms"]
block = [1024]
args = ["a", "b", "c", "arrived", "m", "n", "k"]
*/
/* Blocks wait for blocks that cannot start before they end.
 * expect: timed-out */
#include <cuda_fp16.h>

// All blocks meet before any computes.
extern "C" __global__ void gemm(const half *a, const half *b, half *c, unsigned *arrived, int m, int n, int k) {
  if (threadIdx.x == 0) {
    if (atomicAdd(arrived, 1u) + 1 < gridDim.x) while (*(volatile unsigned *)arrived < gridDim.x) {}
  }
  __syncthreads();
  for (int i = blockIdx.x * 1024 + threadIdx.x; i < m * n; i += gridDim.x * 1024) {
    float sum = 0.0f;
    for (int p = 0; p < k; p++) sum += __half2float(a[i / n * k + p]) * __half2float(b[p * n + i % n]);
    c[i] = __float2half(sum);
  }
}
