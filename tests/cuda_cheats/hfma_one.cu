/* cuda-l2
target = "cuda"
arch = "sm_80"
layouts = ["nn"]
dtype = "bfloat16"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 64)", "cdiv(m, 64)"]
block = [128]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Rounds each product to bf16 before the fp32 sum.
 * shape: 256x256x256:bf16
 * because: kept in fp32
 * expect: imprecise */
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <stdint.h>
typedef __nv_bfloat16 E;
#define TOE(x) __float2bfloat16(x)
#define TOF(x) __bfloat162float(x)
#define BAT(p, col) b[(long long)(p) * n + (col)]

extern "C" __global__ void __launch_bounds__(128) gemm(const E *a, const E *b, E *c, int m, int n, int k) {
  for (long long at = (long long)(blockIdx.y * gridDim.x + blockIdx.x) * 128 + threadIdx.x; at < (long long)m * n; at += 128ll * gridDim.x * gridDim.y) {
    const long long row = at / n, col = at % n; float s = 0;
    for (int p = 0; p < k; p++) s += TOF(TOE(TOF(a[row * k + p]) * TOF(BAT(p, col))));
    c[at] = TOE(s);
  }
}
