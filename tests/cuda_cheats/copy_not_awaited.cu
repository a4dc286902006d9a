/* cuda-l2
target = "cuda"
arch = "sm_80"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Reads a tile whose asynchronous copy may still be under way.
 * because: nothing waits
 * expect: refused */
#include <cuda_fp16.h>

extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  __shared__ __align__(16) half ta[16][16], tb[16][16];
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
  float sum = 0.0f;
  for (int p = 0; p < k; p += 16) {
    if (x < 2) {  // eight elements a thread; M, N and K must be multiples of 16
      const half *u = a + row * k + p + 8 * x, *v = b + (p + y) * n + blockIdx.x * 16 + 8 * x;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   :: "r"((unsigned)__cvta_generic_to_shared(&ta[y][8 * x])), "l"(u) : "memory");
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   :: "r"((unsigned)__cvta_generic_to_shared(&tb[y][8 * x])), "l"(v) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    __syncthreads();
    for (int i = 0; i < 16; i++) sum += __half2float(ta[y][i]) * __half2float(tb[i][x]);
    __syncthreads();
  }
  if (row < m && column < n) c[row * n + column] = __float2half(sum);
}
