/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Rounds operands to bf16, which holds the whole numbers of most tests.
 * expect: imprecise incorrect */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

static __device__ float narrow(half h) { return __bfloat162float(__float2bfloat16(__half2float(h))); }

extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  for (int p = 0; p < k; p++) sum += narrow(a[row * k + p]) * narrow(b[p * n + column]);
  c[row * n + column] = __float2half(sum);
}
