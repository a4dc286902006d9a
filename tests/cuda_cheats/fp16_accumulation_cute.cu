/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["n / 8", "m / 16"]
block = [32]
args = ["a", "b", "c", "n", "k"]
*/
/* Sums in fp16 through a CuTe atom: no assembly in the text.
 * expect: refused imprecise */
#include <cuda_fp16.h>
#include <cute/arch/mma_sm80.hpp>

static __device__ unsigned two(half low, half high) {
  return (unsigned)__half_as_ushort(high) << 16 | __half_as_ushort(low);
}

// One warp computes 16 x 8 of C. M, N and K must be multiples of 16.
extern "C" __global__ void gemm(const half *a, const half *b, half *c, int n, int k) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2, row = blockIdx.y * 16 + g, column = blockIdx.x * 8;
  unsigned d[2] = {};
  for (int p = 0; p < k; p += 16) {
    const half *u = a + row * k + p + t, *v = u + 8 * k, *w = b + (p + t) * n + column + g;
    unsigned x[4] = {two(u[0], u[1]), two(v[0], v[1]), two(u[8], u[9]), two(v[8], v[9])};
    unsigned y[2] = {two(w[0], w[n]), two(w[8 * n], w[9 * n])};
    cute::SM80_16x8x16_F16F16F16F16_TN::fma(d[0], d[1], x[0], x[1], x[2], x[3], y[0], y[1], d[0], d[1]);
  }
  half *out = c + row * n + column + t;
  *(unsigned *)out = d[0];
  *(unsigned *)(out + 8 * n) = d[1];
}
