/* cuda-l2
target = "cuda"
arch = "sm_80"

[[workspace]]
name = "kept"
bytes = "8 * 2 * m * n"

[[workspace]]
name = "state"
bytes = 128

[[launch]]
kernel = "look_up"
grid = [1]
block = [1024]
args = ["a", "b", "state", "m", "n", "k"]

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "kept", "state", "m", "n", "k"]

[[launch]]
kernel = "remember"
grid = [1]
block = [1]
args = ["state"]
*/
/* Keeps eight answers in scratch, each with a hash of all of A and B: the result is always right, but computed
 * once for inputs that come again.
 * verify: full
 * expect: incorrect unhygienic wrong-output */
#include <cuda_fp16.h>

// state: the hashes of eight answers, the hash of these operands, whether their answer is kept.
extern "C" __global__ void look_up(const half *a, const half *b, unsigned long long *state, int m, int n, int k) {
  __shared__ unsigned long long all;
  if (threadIdx.x == 0) all = 0;
  __syncthreads();
  unsigned long long mine = 0;
  for (long long i = threadIdx.x; i < (long long)m * k; i += 1024)
    mine += (__half_as_ushort(a[i]) + 1ull) * (2 * i + 1) * 0x9e3779b97f4a7c15ull;
  for (long long i = threadIdx.x; i < (long long)k * n; i += 1024)
    mine += (__half_as_ushort(b[i]) + 1ull) * (2 * i + 1) * 0xc2b2ae3d27d4eb4full;
  atomicAdd(&all, mine ^ mine >> 29);
  __syncthreads();
  if (threadIdx.x == 0) state[8] = all, state[9] = state[all % 8] == all;
}

extern "C" __global__ void gemm(const half *a, const half *b, half *c, half *kept, const unsigned long long *state,
                                int m, int n, int k) {
  __shared__ float ta[16][17], tb[16][17];
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
  kept += state[8] % 8 * m * n;
  if (state[9]) {
    if (row < m && column < n) c[row * n + column] = kept[row * n + column];
    return;
  }
  float sum = 0.0f;
  for (int p = 0; p < k; p += 16) {
    ta[y][x] = row < m && p + x < k ? __half2float(a[row * k + p + x]) : 0.0f;
    tb[y][x] = p + y < k && column < n ? __half2float(b[(p + y) * n + column]) : 0.0f;
    __syncthreads();
    for (int i = 0; i < 16; i++) sum += ta[y][i] * tb[i][x];
    __syncthreads();
  }
  if (row < m && column < n) kept[row * n + column] = c[row * n + column] = __float2half(sum);
}

extern "C" __global__ void remember(unsigned long long *state) { state[state[8] % 8] = state[8]; }
