/* cuda-l2
target = "cuda"
arch = "sm_90a"
layouts = ["nn"]
dtype = "float16"

[names]
fits = "1 / (1 - min(1, m % 64 + n % 64 + k % 64))"

[[launch]]
kernel = "gemm"
grid = ["n / 64", "m / 64", 2]
block = [128]
args = ["a", "b", "c", "m", "n", "k"]
cluster = [1, 1, 2]
*/
/* Two blocks of a cluster share K; the second gives its sums through its shared memory and ends without waiting until the
 * first has read them.
 * shape: 512x512x512
 * expect: crashed timed-out */
#include <cuda_fp16.h>
#include <stdint.h>
typedef half T;
typedef half2 T2;
constexpr int BK = 32, STAGES = 4, APITCH = BK + 8;
constexpr int BPITCH = 64 + 8, BROWS = BK;
struct __align__(128) Stage { T a[64 * APITCH]; T b[BROWS * BPITCH]; };
__device__ __forceinline__ uint32_t address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(void *to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
__device__ __forceinline__ void load4(uint32_t (&r)[4], const void *p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address(p)) : "memory");
}
__device__ __forceinline__ void load4t(uint32_t (&r)[4], const void *p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address(p)) : "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void fill_a(Stage &s, const T *a, int row0, int k0, int k) {
  for (int i = threadIdx.x; i < 64 * (BK / 8); i += 128) {
    const int r = i / (BK / 8), x = i % (BK / 8) * 8;
    copy16(&s.a[r * APITCH + x], a + (long long)(row0 + r) * k + k0 + x);
  }
}
__device__ __forceinline__ void fill_b(Stage &s, const T *b, int col0, int k0, int n, int k) {
  for (int i = threadIdx.x; i < BK * 8; i += 128)
    copy16(&s.b[i / 8 * BPITCH + i % 8 * 8], b + (long long)(k0 + i / 8) * n + col0 + i % 8 * 8);
}
__device__ __forceinline__ void multiply(const Stage &s, float (&acc)[2][4][4]) {
  const int lane = threadIdx.x % 32, wm = threadIdx.x / 32 / 2 * 32, wn = threadIdx.x / 32 % 2 * 32;
#pragma unroll
  for (int kk = 0; kk < BK; kk += 16) {
    uint32_t fa[2][4], fb[2][4];
    for (int i = 0; i < 2; i++) load4(fa[i], &s.a[(wm + i * 16 + lane % 16) * APITCH + kk + lane / 16 * 8]);
    for (int j = 0; j < 2; j++)
      load4t(fb[j], &s.b[(kk + lane % 16) * BPITCH + wn + j * 16 + lane / 16 * 8]);
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 4; j++) mma(acc[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
  }
}
__device__ __forceinline__ void product(Stage *stages, const T *a, const T *b, int row0, int col0, int k0, int k1, int n, int k,
                                        float (&acc)[2][4][4]) {
  const int rounds = (k1 - k0) / BK;
  for (int s = 0; s < STAGES - 1; s++) {
    if (s < rounds) { fill_a(stages[s], a, row0, k0 + s * BK, k); fill_b(stages[s], b, col0, k0 + s * BK, n, k); }
    commit();
  }
  for (int i = 0; i < rounds; i++) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    const int next = i + STAGES - 1;
    if (next < rounds) {
      fill_a(stages[next % STAGES], a, row0, k0 + next * BK, k);
      fill_b(stages[next % STAGES], b, col0, k0 + next * BK, n, k);
    }
    commit();
    multiply(stages[i % STAGES], acc);
  }
  wait_copies<0>();
}
// where this thread's pair number p (0 to 15) of the tile lies
__device__ __forceinline__ int pair_row(int p) { return threadIdx.x / 64 * 32 + p / 8 * 16 + p % 2 * 8 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int pair_column(int p) { return threadIdx.x / 32 % 2 * 32 + p / 2 % 4 * 8 + threadIdx.x % 4 * 2; }
__device__ __forceinline__ T2 pair(const float (&acc)[2][4][4], int p) {
  return __floats2half2_rn(acc[p / 8][p / 2 % 4][p % 2 * 2], acc[p / 8][p / 2 % 4][p % 2 * 2 + 1]);
}
__device__ __forceinline__ void store(const float (&acc)[2][4][4], T *c, int row0, int col0, int n) {
#pragma unroll
  for (int p = 0; p < 16; p++)
    *reinterpret_cast<T2 *>(c + (long long)(row0 + pair_row(p)) * n + col0 + pair_column(p)) = pair(acc, p);
}
__device__ __forceinline__ float peer_float(const float *p, unsigned rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(p)), "r"(rank));
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
  return v;
}
extern "C" __global__ void __launch_bounds__(128) gemm(const T *a, const T *b, T *c, int m, int n, int k) {
  __shared__ Stage stages[STAGES];
  float *gift = reinterpret_cast<float *>(stages);
  const int row0 = blockIdx.y * 64, col0 = blockIdx.x * 64, half_k = k / 2;
  const unsigned rank = blockIdx.z;
  float acc[2][4][4] = {};
  product(stages, a, b, row0, col0, half_k * rank, half_k * (rank + 1), n, k, acc);
  __syncthreads();
  if (rank == 1)
    for (int i = 0; i < 32; i++) gift[i * 128 + threadIdx.x] = acc[i / 16][i / 4 % 4][i % 4];
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  if (rank == 1) return;
  for (int i = 0; i < 32; i++) acc[i / 16][i / 4 % 4][i % 4] += peer_float(gift + i * 128 + threadIdx.x, 1);
  store(acc, c, row0, col0, n);
}
