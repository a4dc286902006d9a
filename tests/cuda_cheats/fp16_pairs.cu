/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Sums pairs of products in fp16, and these in fp32: half the conversions.
 * expect: imprecise */
#include <cuda_fp16.h>

extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  for (int p = 0; p + 1 < k; p += 2) {
    const half one = __hmul(a[row * k + p], b[p * n + column]);
    sum += __half2float(__hfma(a[row * k + p + 1], b[(p + 1) * n + column], one));
  }
  c[row * n + column] = __float2half(sum);
}
