/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["n / 8", "m / 16"]
block = [32]
args = ["a", "b", "c", "n", "k"]
*/
/* Control: tensor cores with fp32 sums.
 * expect: measured */
#include <cuda_fp16.h>

static __device__ unsigned two(half low, half high) {
  return (unsigned)__half_as_ushort(high) << 16 | __half_as_ushort(low);
}

// One warp computes 16 x 8 of C. M, N and K must be multiples of 16.
extern "C" __global__ void gemm(const half *a, const half *b, half *c, int n, int k) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2, row = blockIdx.y * 16 + g, column = blockIdx.x * 8;
  float d[4] = {};
  for (int p = 0; p < k; p += 16) {
    const half *u = a + row * k + p + t, *v = u + 8 * k, *w = b + (p + t) * n + column + g;
    unsigned x[4] = {two(u[0], u[1]), two(v[0], v[1]), two(u[8], u[9]), two(v[8], v[9])};
    unsigned y[2] = {two(w[0], w[n]), two(w[8 * n], w[9 * n])};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  }
  half *out = c + row * n + column + t;
  out[0] = __float2half(d[0]), out[1] = __float2half(d[1]);
  out[8 * n] = __float2half(d[2]), out[8 * n + 1] = __float2half(d[3]);
}
