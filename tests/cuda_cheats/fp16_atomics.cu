/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "clear"
grid = ["cdiv(m * n, 256)"]
block = [256]
args = ["c", "m", "n"]

[[launch]]
kernel = "partial"
grid = ["cdiv(n, 16)", "cdiv(m, 16)", 4]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Four parts of K are added to C by fp16 atomics.
 * expect: imprecise unhygienic */
#include <cuda_fp16.h>

extern "C" __global__ void clear(half *c, int m, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < m * n) c[i] = __float2half(0.0f);
}

extern "C" __global__ void partial(const half *a, const half *b, half *c, int m, int n, int k) {
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x, z = blockIdx.z;
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  for (int p = k * z / 4; p < k * (z + 1) / 4; p++)
    sum += __half2float(a[row * k + p]) * __half2float(b[p * n + column]);
  atomicAdd(&c[row * n + column], __float2half(sum));
}
