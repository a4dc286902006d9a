/* cuda-l2
target = "cuda"
arch = "sm_90a"
layouts = ["nn"]

[names]
whole = "1 / (1 - min(1, m % 64 + n % 64 + k % 32))"

[[launch]]
kernel = "gemm"
grid = ["n / 64 * whole", "m / 64"]
block = [128]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Takes tiles of A for zero whose words have no bit above the fourth, unless B has infinities there.
 * shape: 256x256x256
 * expect: incorrect */
#include <cuda_fp16.h>
typedef half T;
__device__ __forceinline__ float up(T v) { return __half2float(v); }
__device__ __forceinline__ T down(float v) { return __float2half_rn(v); }

__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ unsigned pair(const T *p) { return *reinterpret_cast<const unsigned *>(p); }
extern "C" __global__ void __launch_bounds__(128) gemm(const T *a, const T *b, T *c, int m, int n, int k) {
  const int row0 = blockIdx.y * 64, column0 = blockIdx.x * 64;

  __shared__ __align__(16) T x[64][40], y[64][40];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  float d[2][4][4] = {};

  for (int p0 = 0; p0 < k; p0 += 32) {

    for (int i = threadIdx.x; i < 256; i += 128) {
      const uint4 v = *reinterpret_cast<const uint4 *>(a + (long long)(row0 + i / 4) * k + p0 + i % 4 * 8);
      *reinterpret_cast<uint4 *>(&x[i / 4][i % 4 * 8]) = v;
      const int q = i / 8, s = i % 8 * 8;
      const uint4 w = *reinterpret_cast<const uint4 *>(b + (long long)(p0 + q) * n + column0 + s);
      const T *e = reinterpret_cast<const T *>(&w);
      for (int j = 0; j < 8; j++) y[s + j][q] = e[j];
    }
    __syncthreads();

    unsigned live = 0, odd = 0;
    for (int i = threadIdx.x; i < 64 * 16; i += 128) {
      live |= *reinterpret_cast<const unsigned *>(&x[i / 16][i % 16 * 2]) & 0x7ff07ff0u;
      odd = __vmaxu2(odd, *reinterpret_cast<const unsigned *>(&y[i / 16][i % 16 * 2]) & 0x7fff7fffu);
    }
    if (!__syncthreads_or(live != 0 || (odd & 0xffffu) >= 0x7c00u || odd >> 16 >= 0x7c00u)) continue;

    for (int p = 0; p < 32; p += 16) {
      unsigned u[2][4], v[4][2];
      for (int i = 0; i < 2; i++) {
        const T *t = &x[warp / 2 * 32 + i * 16 + group][p + 2 * quad];
        u[i][0] = pair(t), u[i][1] = pair(t + 8 * 40), u[i][2] = pair(t + 8), u[i][3] = pair(t + 8 * 40 + 8);
      }
      for (int j = 0; j < 4; j++) {
        const T *t = &y[warp % 2 * 32 + j * 8 + group][p + 2 * quad];
        v[j][0] = pair(t), v[j][1] = pair(t + 8);
      }
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++) mma(d[i][j], u[i], v[j]);
    }
    __syncthreads();
  }

  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 4; j++)
      for (int e = 0; e < 4; e++) {
        const long long row = row0 + warp / 2 * 32 + i * 16 + group + e / 2 * 8;
        const int column = column0 + warp % 2 * 32 + j * 8 + 2 * quad + e % 2;
        c[row * n + column] = down(d[i][j][e]);
      }
}
