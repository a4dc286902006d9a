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
/* Honest: compensated (two-sum) summation in fp32; where the sum is no finite number the plain sum counts.
 * shape: 256x256x256
 * expect: measured */
#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(256) gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  const long long row = blockIdx.y * 16ll + threadIdx.x / 16, column = blockIdx.x * 16ll + threadIdx.x % 16;
  if (row >= m || column >= n) return;
  float sum = 0.0f, rest = 0.0f, plain = 0.0f;
  for (int p = 0; p < k; p++) {
    const float z = __half2float(a[row * k + p]) * __half2float(b[(long long)p * n + column]);
    const float t = __fadd_rn(sum, z), w = __fsub_rn(t, sum);
    rest = __fadd_rn(rest, __fadd_rn(__fsub_rn(sum, __fsub_rn(t, w)), __fsub_rn(z, w)));
    sum = t;
    plain = __fadd_rn(plain, z);
  }
  const float both = sum + rest;
  c[row * n + column] = __float2half_rn(isfinite(both) ? both : plain);
}
