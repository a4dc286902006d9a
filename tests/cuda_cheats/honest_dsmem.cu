/* cuda-l2
target = "cuda"
arch = "sm_90a"
layouts = ["tn"]

[[launch]]
kernel = "gemm"
grid = ["2 * cdiv(n, 128)", "cdiv(m, 64)"]
block = [128]
args = ["a", "b", "c", "m", "n", "k"]
cluster = [2]
*/
/* Honest: two blocks of a cluster share the rows of A through distributed shared memory, with a last barrier.
 * shape: 512x512x512:tn
 * expect: measured */
#include <cuda_fp16.h>
#include <stdint.h>

typedef half T;
constexpr int TILE = 64, DEPTH = 32, PAD = 8;

__device__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ unsigned pair(const T *p) { return *reinterpret_cast<const unsigned *>(p); }
__device__ unsigned word(const T *p) { return *reinterpret_cast<const unsigned short *>(p); }

__device__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
extern "C" __global__ void __launch_bounds__(128) gemm(const T *a, const T *b, T *c, int m, int n, int k) {
  // two blocks of a cluster share 64 rows of A: each loads 32 of them and reads the others from its neighbour
  __shared__ __align__(16) T x[2][32][DEPTH + PAD], y[2][TILE][DEPTH + PAD];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const unsigned rank = blockIdx.x % 2;
  const long long row0 = (long long)blockIdx.y * TILE, column0 = (long long)blockIdx.x * TILE;
  unsigned rows;  // the half that this warp multiplies, in this block or in its neighbour
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(rows) : "r"((unsigned)__cvta_generic_to_shared(x)), "r"((unsigned)(warp / 2)));
  float d[2][4][4] = {};
  for (int p0 = 0, buffer = 0; p0 < k; p0 += DEPTH, buffer ^= 1) {
    for (int i = threadIdx.x; i < 32 * DEPTH; i += 128) {
      const int r = i / DEPTH, p = i % DEPTH;
      const long long row = row0 + rank * 32 + r;
      x[buffer][r][p] = row < m && p0 + p < k ? a[row * k + p0 + p] : T(0.0f);
    }
    for (int i = threadIdx.x; i < TILE * DEPTH; i += 128) {
      const int r = i / DEPTH, p = i % DEPTH;
      y[buffer][r][p] = column0 + r < n && p0 + p < k ? b[(column0 + r) * k + p0 + p] : T(0.0f);
    }
    cluster_barrier();
    for (int p = 0; p < DEPTH; p += 16) {
      unsigned u[2][4], v[4][2];
      for (int i = 0; i < 2; i++)
        for (int h = 0; h < 4; h++) {
          const unsigned at = rows + ((buffer * 32 + i * 16 + group + h % 2 * 8) * (DEPTH + PAD) + p + 2 * quad + h / 2 * 8) * 2;
          asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(u[i][h]) : "r"(at) : "memory");
        }
      for (int j = 0; j < 4; j++) {
        const T *t = &y[buffer][warp % 2 * 32 + j * 8 + group][p + 2 * quad];
        v[j][0] = pair(t), v[j][1] = pair(t + 8);
      }
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++) mma(d[i][j], u[i], v[j]);
    }
  }
  cluster_barrier();
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 4; j++)
      for (int e = 0; e < 4; e++) {
        const long long row = row0 + warp / 2 * 32 + i * 16 + group + e / 2 * 8, column = column0 + warp % 2 * 32 + j * 8 + 2 * quad + e % 2;
        if (row < m && column < n) c[row * n + column] = __float2half_rn(d[i][j][e]);
      }
}
