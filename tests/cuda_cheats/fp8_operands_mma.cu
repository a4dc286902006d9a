/* cuda-l2
target = "cuda"
arch = "sm_89"

[[launch]]
kernel = "gemm"
grid = ["n / 8", "m / 16"]
block = [32]
args = ["a", "b", "c", "n", "k"]
*/
/* Multiplies in fp8 by the tensor cores.
 * expect: refused imprecise incorrect */
#include <cuda_fp16.h>

// Four elements as bytes, `step` apart.
static __device__ unsigned four(const half *p, int step) {
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(__half2float(p[step])), "f"(__half2float(p[0])));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(high) : "f"(__half2float(p[3 * step])), "f"(__half2float(p[2 * step])));
  return (unsigned)high << 16 | low;
}

// One warp computes 16 x 8 of C. M must be a multiple of 16, N of 8, K of 32.
extern "C" __global__ void gemm(const half *a, const half *b, half *c, int n, int k) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4, row = blockIdx.y * 16 + g, column = blockIdx.x * 8;
  float d[4] = {};
  for (int p = 0; p < k; p += 32) {
    const half *u = a + row * k + p + 4 * t, *v = u + 8 * k, *w = b + (p + 4 * t) * n + column + g;
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(four(u, 1)), "r"(four(v, 1)), "r"(four(u + 16, 1)), "r"(four(v + 16, 1)), "r"(four(w, n)),
                   "r"(four(w + 16 * n, n)));
  }
  half *out = c + row * n + column + 2 * t;
  out[0] = __float2half(d[0]), out[1] = __float2half(d[1]);
  out[8 * n] = __float2half(d[2]), out[8 * n + 1] = __float2half(d[3]);
}
