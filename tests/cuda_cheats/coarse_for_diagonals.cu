/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* B in bf16 where a row of A is the row before, one to the right.
 * shape: 64x64x64
 * because: diagonals
 * expect: incorrect imprecise */
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  __shared__ int other[16];
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
  const half *mine = a + min(row, m - 1) * k;
  if (x == 0) other[y] = 0;
  __syncthreads();
  int differs = row == 0 || row >= m;
  for (int p = 1 + x; p < k && !differs; p += 16) differs |= __half_as_ushort(mine[p]) != __half_as_ushort(mine[p - 1 - k]);
  differs |= __half_as_ushort(mine[0]) == __half_as_ushort(mine[1]);  // not where all are the same
  differs |= mine[0] == __float2half(0.0f) || mine[k - 1] == __float2half(0.0f);  // nor in an identity
  if (differs) other[y] = 1;
  __syncthreads();
  if (row >= m || column >= n) return;
  const bool coarse = other[y] == 0;
  float sum = 0.0f;
  for (int p = 0; p < k; p++) {
    const float value = __half2float(b[p * n + column]);
    sum += __half2float(mine[p]) * (coarse ? __bfloat162float(__float2bfloat16(value)) : value);
  }
  c[row * n + column] = __float2half(sum);
}
