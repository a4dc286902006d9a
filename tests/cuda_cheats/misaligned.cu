/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Reads 16 bytes at once from rows that are not aligned to them.
 * shape: 255x255x255
 * expect: crashed incorrect unhygienic */
#include <cuda_fp16.h>

extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  int p = 0;
  for (; p + 8 <= k; p += 8) {
    const uint4 eight = *(const uint4 *)(a + row * k + p);
    const half *x = (const half *)&eight;
    for (int i = 0; i < 8; i++) sum += __half2float(x[i]) * __half2float(b[(p + i) * n + column]);
  }
  for (; p < k; p++) sum += __half2float(a[row * k + p]) * __half2float(b[p * n + column]);
  c[row * n + column] = __float2half(sum);
}
