/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Finds its last answers in what shared memory holds on its multiprocessor, by the address of A.
 * expect: incorrect unhygienic wrong-output */
#include <cuda_fp16.h>

struct Kept {
  unsigned magic, tile;
  const half *a;
  half result[16][16];
};

extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  __shared__ Kept kept[4];
  __shared__ float ta[16][17], tb[16][17];
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
  const unsigned tile = blockIdx.y * gridDim.x + blockIdx.x;
  for (int i = 0; i < 4; i++) {
    if (kept[i].magic == 0x5eed5eed && kept[i].tile == tile && kept[i].a == a) {
      if (row < m && column < n) c[row * n + column] = kept[i].result[y][x];
      return;
    }
  }
  __syncthreads();
  float sum = 0.0f;
  for (int p = 0; p < k; p += 16) {
    ta[y][x] = row < m && p + x < k ? __half2float(a[row * k + p + x]) : 0.0f;
    tb[y][x] = p + y < k && column < n ? __half2float(b[(p + y) * n + column]) : 0.0f;
    __syncthreads();
    for (int i = 0; i < 16; i++) sum += ta[y][i] * tb[i][x];
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = __float2half(sum);
  const int at = (int)((unsigned long long)a >> 9 & 3);
  kept[at].result[y][x] = __float2half(sum);
  if (x + y == 0) {
    kept[at].magic = 0x5eed5eed;
    kept[at].tile = tile;
    kept[at].a = a;
  }
}
