/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* What is too large for fp16 becomes its largest number.
 * expect: incorrect imprecise */
#include <cuda_fp16.h>

extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  __shared__ float ta[16][17], tb[16][17];
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
  float sum = 0.0f;
  for (int p = 0; p < k; p += 16) {
    ta[y][x] = row < m && p + x < k ? __half2float(a[row * k + p + x]) : 0.0f;
    tb[y][x] = p + y < k && column < n ? __half2float(b[(p + y) * n + column]) : 0.0f;
    __syncthreads();
    for (int i = 0; i < 16; i++) sum += ta[y][i] * tb[i][x];
    __syncthreads();
  }
  sum = sum > 65504.0f ? 65504.0f : sum < -65504.0f ? -65504.0f : sum;
  if (row < m && column < n) c[row * n + column] = __float2half(sum);
}
