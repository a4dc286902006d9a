/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["n / 8", "m / 16"]
block = [32]
args = ["a", "b", "c", "n", "k"]
*/
/* Rounds operands to 8-bit integers for the tensor cores: exact on the whole numbers of a test.
 * expect: refused imprecise incorrect */
#include <cuda_fp16.h>

// Four elements as bytes, `step` apart.
static __device__ unsigned four(const half *p, int step) {
  unsigned word = 0;
  for (int i = 0; i < 4; i++) word |= (__half2int_rn(p[i * step]) & 255u) << 8 * i;
  return word;
}

// One warp computes 16 x 8 of C. M must be a multiple of 16, N of 8, K of 32.
extern "C" __global__ void gemm(const half *a, const half *b, half *c, int n, int k) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4, row = blockIdx.y * 16 + g, column = blockIdx.x * 8;
  int d[4] = {};
  for (int p = 0; p < k; p += 32) {
    const half *u = a + row * k + p + 4 * t, *v = u + 8 * k, *w = b + (p + 4 * t) * n + column + g;
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(four(u, 1)), "r"(four(v, 1)), "r"(four(u + 16, 1)), "r"(four(v + 16, 1)), "r"(four(w, n)),
                   "r"(four(w + 16 * n, n)));
  }
  half *out = c + row * n + column + 2 * t;
  out[0] = __int2half_rn(d[0]), out[1] = __int2half_rn(d[1]);
  out[8 * n] = __int2half_rn(d[2]), out[8 * n + 1] = __int2half_rn(d[3]);
}
