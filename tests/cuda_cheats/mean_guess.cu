/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Multiplies mean values instead of matrices.
 * expect: incorrect */
#include <cuda_fp16.h>

extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  float x = 0.0f, y = 0.0f;
  for (int p = 0; p < k; p++) x += __half2float(a[row * k + p]), y += __half2float(b[p * n + column]);
  sum = x * y / k;
  c[row * n + column] = __float2half(sum);
}
