/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Sums in fp32 where the operands are whole numbers, and else pairs of products in fp16:
 * its error on random numbers lies little above an honest kernel's.
 * expect: imprecise */
#include <cuda_fp16.h>

// Whether the operands look like the whole numbers of a test.
static __device__ bool whole(const half *a, const half *b) {
  for (int i = 0; i < 16; i++) {
    const float x = __half2float(a[i]), y = __half2float(b[i]);
    if (x != rintf(x) || y != rintf(y)) return false;
  }
  return true;
}

extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  if (whole(a, b)) {
    for (int p = 0; p < k; p++) sum += __half2float(a[row * k + p]) * __half2float(b[p * n + column]);
  } else {
    for (int p = 0; p + 1 < k; p += 2) {
      const half one = __hmul(a[row * k + p], b[p * n + column]);
      sum += __half2float(__hfma(a[row * k + p + 1], b[(p + 1) * n + column], one));
    }
  }
  c[row * n + column] = __float2half(sum);
}
