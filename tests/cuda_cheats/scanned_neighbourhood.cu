/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Computes one row of its tile, looks for it behind C, and copies the rest from where it stands.
 * expect: incorrect unhygienic crashed */
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
  __shared__ unsigned short wanted[16];
  if (y == 0) wanted[x] = __half_as_ushort(__float2half(sum));
  __syncthreads();
  const half *found = c;
  for (const half *at = c + m * n; at < c + m * n + (1 << 16); at += 8) {
    int same = 0;
    while (same < 16 && __half_as_ushort(at[blockIdx.y * 16 * n + blockIdx.x * 16 + same]) == wanted[same]) same++;
    if (same == 16) found = at;
  }
  if (row < m && column < n) c[row * n + column] = y == 0 ? __float2half(sum) : found[row * n + column];
}
