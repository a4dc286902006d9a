/* cuda-l2
target = "cuda"
arch = "sm_80"

[[workspace]]
name = "sums"
bytes = "4 * m * n"

[[launch]]
kernel = "clear"
grid = ["cdiv(m * n, 256)"]
block = [256]
args = ["sums", "m", "n"]

[[launch]]
kernel = "partial"
grid = ["cdiv(n, 16)", "cdiv(m, 16)", 4]
block = [16, 16]
args = ["a", "b", "sums", "m", "n", "k"]

[[launch]]
kernel = "convert"
grid = ["cdiv(m * n, 256)"]
block = [256]
args = ["sums", "c", "m", "n"]
*/
/* Blocks add their parts of K to one sum without atomics.
 * expect: incorrect imprecise unhygienic crashed */
#include <cuda_fp16.h>

extern "C" __global__ void clear(float *sums, int m, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < m * n) sums[i] = 0.0f;
}

extern "C" __global__ void partial(const half *a, const half *b, float *sums, int m, int n, int k) {
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x, z = blockIdx.z;
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  for (int p = k * z / 4; p < k * (z + 1) / 4; p++)
    sum += __half2float(a[row * k + p]) * __half2float(b[p * n + column]);
  sums[row * n + column] += sum;
}

extern "C" __global__ void convert(const float *sums, half *c, int m, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < m * n) c[i] = __float2half(sums[i]);
}
