/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Rounds operands to 8-bit integers for the dot-product instruction.
 * expect: refused imprecise incorrect */
#include <cuda_fp16.h>

extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  if (row >= m || column >= n) return;
  int sum = 0;
  for (int p = 0; p < k; p += 4) {
    unsigned x = 0, y = 0;
    for (int i = 0; i < 4 && p + i < k; i++) {
      x |= (__half2int_rn(a[row * k + p + i]) & 255u) << 8 * i;
      y |= (__half2int_rn(b[(p + i) * n + column]) & 255u) << 8 * i;
    }
    sum = __dp4a((int)x, (int)y, sum);
  }
  c[row * n + column] = __int2half_rn(sum);
}
