/* cuda-l2
target = "cuda"
arch = "sm_80"
layouts = ["nn"]

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [256]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Honest: sums in double precision, rounded once to fp16.
 * shape: 256x256x256
 * expect: measured */
#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(256) gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  const long long row = blockIdx.y * 16ll + threadIdx.x / 16, column = blockIdx.x * 16ll + threadIdx.x % 16;
  if (row >= m || column >= n) return;
  double sum = 0.0;
  for (int p = 0; p < k; p++) sum += (double)__half2float(a[row * k + p]) * (double)__half2float(b[(long long)p * n + column]);
  c[row * n + column] = __double2half(sum);
}
