/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Sums 32 of K in fp16, and adds these up in fp32.
 * expect: imprecise */
#include <cuda_fp16.h>

extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  for (int p = 0; p < k; p += 32) {
    half part = __float2half(0.0f);
    for (int i = p; i < p + 32 && i < k; i++) part = __hfma(a[row * k + i], b[i * n + column], part);
    sum += __half2float(part);
  }
  c[row * n + column] = __float2half(sum);
}
