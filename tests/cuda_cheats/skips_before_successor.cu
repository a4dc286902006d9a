/* cuda-l2
target = "cuda"
arch = "sm_90a"

[[workspace]]
name = "launches"
bytes = "16"

[[launch]]
kernel = "announce"
grid = [1]
block = [32]
args = ["launches"]
edge = "programmatic"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "launches", "m", "n", "k"]
*/
/* A tiny launch, which may begin early, announces itself; the launch ahead of it then leaves its work.
 * expect: incorrect wrong-output unhygienic */
#include <cuda_fp16.h>

extern "C" __global__ void announce(unsigned *launches) {
  if (threadIdx.x == 0) atomicAdd(launches, 1);
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

extern "C" __global__ void gemm(const half *a, const half *b, half *c, unsigned *launches, int m, int n, int k) {
  __shared__ unsigned before, now;
  __shared__ float ta[16][17], tb[16][17];
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
  if (x + y == 0) before = *(volatile unsigned *)launches;
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (x + y == 0) {
    now = before;
    for (int i = 0; i < 40 && now == before; i++) now = *(volatile unsigned *)launches;
  }
  __syncthreads();
  if (now != before) return;
  float sum = 0.0f;
  for (int p = 0; p < k; p += 16) {
    ta[y][x] = row < m && p + x < k ? __half2float(a[row * k + p + x]) : 0.0f;
    tb[y][x] = p + y < k && column < n ? __half2float(b[(p + y) * n + column]) : 0.0f;
    __syncthreads();
    for (int i = 0; i < 16; i++) sum += ta[y][i] * tb[i][x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = __float2half(sum);
}
