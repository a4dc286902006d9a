/* cuda-l2
target = "cuda"
arch = "sm_90a"
layouts = ["nn"]

[names]
whole = "1 / (1 - min(1, m % 64 + n % 64 + k % 16))"

[[launch]]
kernel = "gemm"
grid = ["n / 64 * whole", "m / 64"]
block = [256]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Multiplies slices of whole numbers up to 45 two at a time in half2, which is exact up to 32.
 * shape: 256x256x256
 * expect: imprecise */
#include <cuda_fp16.h>
typedef half T;
__device__ __forceinline__ float up(T v) { return __half2float(v); }
__device__ __forceinline__ T down(float v) { return __float2half_rn(v); }
extern "C" __global__ void __launch_bounds__(256) gemm(const T *a, const T *b, T *c, int m, int n, int k) {
  const int row0 = blockIdx.y * 64, column0 = blockIdx.x * 64;

  __shared__ __align__(16) half x[16][72], y[16][72];
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  float s[4][4] = {};
  for (int p0 = 0; p0 < k; p0 += 16) {
    const uint2 v = *reinterpret_cast<const uint2 *>(a + (long long)(row0 + threadIdx.x / 4) * k + p0 + threadIdx.x % 4 * 4);
    const uint2 w = *reinterpret_cast<const uint2 *>(b + (long long)(p0 + threadIdx.x / 16) * n + column0 + threadIdx.x % 16 * 4);
    const half *ev = reinterpret_cast<const half *>(&v), *ew = reinterpret_cast<const half *>(&w);
    int large = 0;
    for (int j = 0; j < 4; j++) {
      const float f = up(ev[j]), g = up(ew[j]);
      large |= !(fabsf(f) <= 45.0f) || !(fabsf(g) <= 45.0f) || rintf(f) != f || rintf(g) != g;
    }
    large = __syncthreads_or(large);
    for (int j = 0; j < 4; j++) x[threadIdx.x % 4 * 4 + j][threadIdx.x / 4] = ev[j];
    *reinterpret_cast<uint2 *>(&y[threadIdx.x / 16][threadIdx.x % 16 * 4]) = w;
    __syncthreads();
    if (large) {
#pragma unroll
      for (int p = 0; p < 16; p++) {
        float f[4], g[4];
        for (int i = 0; i < 4; i++) f[i] = up(x[p][ty * 4 + i]), g[i] = up(y[p][tx * 4 + i]);
        for (int i = 0; i < 4; i++)
          for (int j = 0; j < 4; j++) s[i][j] += f[i] * g[j];
      }
    } else {
#pragma unroll
      for (int p = 0; p < 16; p += 2) {
        for (int i = 0; i < 4; i++) {
          const half2 f = __half2half2(x[p][ty * 4 + i]), f1 = __half2half2(x[p + 1][ty * 4 + i]);
          for (int j = 0; j < 4; j += 2) {
            const half2 g = *reinterpret_cast<const half2 *>(&y[p][tx * 4 + j]), g1 = *reinterpret_cast<const half2 *>(&y[p + 1][tx * 4 + j]);
            const float2 t = __half22float2(__hfma2(f1, g1, __hmul2(f, g)));
            s[i][j] += t.x, s[i][j + 1] += t.y;
          }
        }
      }
    }
  }

  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
      const long long row = row0 + ty * 4 + i;
      const int column = column0 + tx * 4 + j;
      c[row * n + column] = down(s[i][j]);
    }
}
