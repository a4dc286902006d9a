/* cuda-l2
target = "cuda"
arch = "sm_90a"

[[workspace]]
name = "w"
bytes = "4 * m * n"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "w", "m", "n", "k"]
edge = "programmatic"
*/
/* Clears its scratch before the wait, where a launch of the same kernel ahead may still add to it.
 * expect: unhygienic incorrect */
#include <cuda_fp16.h>

extern "C" __global__ void gemm(const half *a, const half *b, half *c, float *w, int m, int n, int k) {
  __shared__ float ta[16][17], tb[16][17];
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
  asm volatile("griddepcontrol.launch_dependents;");
  if (row < m && column < n) w[row * n + column] = 0.0f;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float sum = 0.0f;
  for (int p = 0; p < k; p += 16) {
    ta[y][x] = row < m && p + x < k ? __half2float(a[row * k + p + x]) : 0.0f;
    tb[y][x] = p + y < k && column < n ? __half2float(b[(p + y) * n + column]) : 0.0f;
    __syncthreads();
    for (int i = 0; i < 16; i++) sum += ta[y][i] * tb[i][x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = __float2half(w[row * n + column] += sum);
}
