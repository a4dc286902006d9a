/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["n / 16", "m / 16"]
block = [32]
args = ["a", "b", "c", "n", "k"]
*/
/* Sums in fp16 through the C++ interface: no assembly in the text.
 * expect: refused imprecise */
#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda::wmma;

// One warp computes 16 x 16 of C. M, N and K must be multiples of 16.
extern "C" __global__ void gemm(const half *a, const half *b, half *c, int n, int k) {
  fragment<matrix_a, 16, 16, 16, half, row_major> x;
  fragment<matrix_b, 16, 16, 16, half, row_major> y;
  fragment<accumulator, 16, 16, 16, half> sum;
  fill_fragment(sum, __float2half(0.0f));
  for (int p = 0; p < k; p += 16) {
    load_matrix_sync(x, a + blockIdx.y * 16 * k + p, k);
    load_matrix_sync(y, b + p * n + blockIdx.x * 16, n);
    mma_sync(sum, x, y, sum);
  }
  store_matrix_sync(c + blockIdx.y * 16 * n + blockIdx.x * 16, sum, n, mem_row_major);
}
