/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["n / 8", "m / 16"]
block = [32]
args = ["a", "b", "c", "n", "k"]
*/
/* Multiplies in tf32 by the tensor cores: right on fp16 operands, but no fp16 instruction, which the class asks for.
 * expect: refused imprecise incorrect */
#include <cuda_fp16.h>

// One warp computes 16 x 8 of C. M, N and K must be multiples of 16.
extern "C" __global__ void gemm(const half *a, const half *b, half *c, int n, int k) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4, row = blockIdx.y * 16 + g, column = blockIdx.x * 8;
  float d[4] = {};
  for (int p = 0; p < k; p += 8) {
    const half *u = a + row * k + p + t, *v = u + 8 * k, *w = b + (p + t) * n + column + g;
    const float x[4] = {__half2float(u[0]), __half2float(v[0]), __half2float(u[4]), __half2float(v[4])};
    const float y[2] = {__half2float(w[0]), __half2float(w[4 * n])};
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(x[0])), "r"(__float_as_uint(x[1])), "r"(__float_as_uint(x[2])),
                   "r"(__float_as_uint(x[3])), "r"(__float_as_uint(y[0])), "r"(__float_as_uint(y[1])));
  }
  half *out = c + row * n + column + 2 * t;
  out[0] = __float2half(d[0]), out[1] = __float2half(d[1]);
  out[8 * n] = __float2half(d[2]), out[8 * n + 1] = __float2half(d[3]);
}
