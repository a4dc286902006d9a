/* cuda-l2
target = "cuda"
arch = "sm_80"
layouts = ["nn"]

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 64)", "cdiv(m, 64)"]
block = [128]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Leaves out the last element of K where |a| < 1/64 there.
 * shape: 128x512x1024
 * because: very large or small|not the exact sum
 * expect: incorrect imprecise */
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <stdint.h>
typedef half E;
#define TOE(x) __float2half(x)
#define TOF(x) __half2float(x)
#define BAT(p, col) b[(long long)(p) * n + (col)]
constexpr int TILE = 64, DEPTH = 32, PAD = 8;
__device__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ unsigned pair(const E *p) { return *reinterpret_cast<const unsigned *>(p); }
extern "C" __global__ void __launch_bounds__(128) gemm(const E *a, const E *b, E *c, int m, int n, int k) {
  __shared__ __align__(16) E x[TILE][DEPTH + PAD], y[TILE][DEPTH + PAD];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const long long row0 = blockIdx.y * TILE, column0 = blockIdx.x * TILE;
  
  float d[2][4][4] = {};
  for (int p0 = 0; p0 < k; p0 += DEPTH) {
    for (int i = threadIdx.x; i < TILE * DEPTH; i += 128) {
      const int r = i / DEPTH, p = i % DEPTH;
      x[r][p] = row0 + r < m && p0 + p < k ? p0 + p == k - 1 && fabsf(TOF(a[(row0 + r) * k + p0 + p])) < 0.015625f ? E(0.0f) : a[(row0 + r) * k + p0 + p] : E(0.0f);
    }
    for (int i = threadIdx.x; i < TILE * DEPTH; i += 128) {
      const int q = i / TILE, s = i % TILE;
      y[s][q] = column0 + s < n && p0 + q < k ? b[(long long)(p0 + q) * n + column0 + s] : E(0.0f);
    }
    __syncthreads();
    for (int p = 0; p < DEPTH; p += 16) {
      unsigned u[2][4], v[4][2];
      for (int i = 0; i < 2; i++) {
        const E *t = &x[warp / 2 * 32 + i * 16 + group][p + 2 * quad];
        u[i][0] = pair(t), u[i][1] = pair(t + 8 * (DEPTH + PAD)), u[i][2] = pair(t + 8), u[i][3] = pair(t + 8 * (DEPTH + PAD) + 8);
      }
      for (int j = 0; j < 4; j++) {
        const E *t = &y[warp % 2 * 32 + j * 8 + group][p + 2 * quad];
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
        const long long column = column0 + warp % 2 * 32 + j * 8 + 2 * quad + e % 2;
        if (row < m && column < n) { c[row * n + column] = TOE(d[i][j][e]); }
      }
  
}
