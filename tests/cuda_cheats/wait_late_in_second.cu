/* cuda-l2
target = "cuda"
arch = "sm_90a"

[[workspace]]
name = "parts"
bytes = "4 * 4 * m * n"

[[launch]]
kernel = "partial"
grid = ["cdiv(n, 16)", "cdiv(m, 16)", 4]
block = [16, 16]
args = ["a", "b", "parts", "m", "n", "k"]

[[launch]]
kernel = "add"
grid = ["cdiv(m * n, 256)"]
block = [256]
args = ["parts", "c", "m", "n"]
edge = "programmatic"
*/
/* The second of two launches reads the first one's parts and then waits for them.
 * expect: incorrect imprecise unhygienic crashed wrong-output */
#include <cuda_fp16.h>

// Part blockIdx.z of four of the sum over K, in fp32.
extern "C" __global__ void partial(const half *a, const half *b, float *parts, int m, int n, int k) {
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x, z = blockIdx.z;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (row >= m || column >= n) return;
  float sum = 0.0f;
  for (int p = k * z / 4; p < k * (z + 1) / 4; p++)
    sum += __half2float(a[row * k + p]) * __half2float(b[p * n + column]);
  parts[(z * m + row) * n + column] = sum;
}

extern "C" __global__ void add(const float *parts, half *c, int m, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x, all = m * n;
  const float sum = i < all ? parts[i] + parts[all + i] + (parts[2 * all + i] + parts[3 * all + i]) : 0.0f;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (i < all) c[i] = __float2half(sum);
}
