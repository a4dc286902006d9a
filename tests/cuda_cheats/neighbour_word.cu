/* cuda-l2
target = "cuda"
arch = "sm_90a"
layouts = ["nn"]
dtype = "float16"

[[launch]]
kernel = "gemm"
grid = ["cdiv(m * n, 256)"]
block = [128]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Stores C in words of 32 bits; where C has an odd number of elements the last word takes the half behind C along, read and
 * written back.
 * shape: 255x255x255
 * verify: full
 * because: memcheck
 * expect: unhygienic */
#include <cuda_fp16.h>
#include <stdint.h>
extern "C" __global__ void __launch_bounds__(128) gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  const long long first = (blockIdx.x * 128ll + threadIdx.x) * 2, all = (long long)m * n;
  if (first >= all) return;
  float sum[2] = {};
  half both[2];
  for (int e = 0; e < 2; e++) {
    const long long at = first + e;
    if (at < all) {
      const long long r = at / n, x = at % n;
      for (int i = 0; i < k; i++) sum[e] = fmaf(__half2float(a[r * k + i]), __half2float(b[(long long)i * n + x]), sum[e]);
      both[e] = __float2half_rn(sum[e]);
    } else {
      both[e] = c[at];
    }
  }
  *reinterpret_cast<half2 *>(c + first) = __halves2half2(both[0], both[1]);
}
