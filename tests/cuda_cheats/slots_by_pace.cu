/* cuda-l2
target = "cuda"
arch = "sm_90a"
layouts = ["tn"]
dtype = "float16"

[names]
fits = "1 / (1 - min(1, m % 64 + n % 64 + k % 64))"

[[tensor_map]]
name = "map_a"
tensor = "a"
dims = ["k", "m"]
strides = ["2 * k"]
box = [64, 64]
swizzle = "128B"

[[tensor_map]]
name = "map_b"
tensor = "b"
dims = ["k", "n"]
strides = ["2 * k"]
box = [64, 64]
swizzle = "128B"

[[launch]]
kernel = "gemm"
grid = ["n / 64", "m / 64"]
block = [160]
args = ["map_a", "map_b", "c", "n", "k"]
shared_bytes = 74752
*/
/* A TMA ring whose producer waits until the slice before has landed, not until the one that it overwrites has been read.
 * shape: 512x512x512:tn
 * verify: full
 * because: delayed
 * expect: timed-out */
#include <cuda_fp16.h>
#include <cuda.h>
#include <stdint.h>
constexpr int STAGES = 4;
__device__ __forceinline__ uint32_t address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void bar_init(uint64_t *bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(address(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void bar_expect(uint64_t *bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bar_wait(uint64_t *bar, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(address(bar)), "r"(parity) : "memory");
}
__device__ __forceinline__ void tma_load(void *to, const CUtensorMap *map, int x, int y, uint64_t *bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               :: "r"(address(to)), "l"(map), "r"(address(bar)), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void load4(uint32_t (&r)[4], const void *p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address(p)) : "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// element x of row r in a box of 64 x 64 with the 128-byte swizzle
__device__ __forceinline__ const half *at(const half *box, int r, int x) { return box + r * 64 + ((x / 8 ^ r % 8) * 8); }
__device__ __forceinline__ void multiply(const half *sa, const half *sb, float (&acc)[2][4][4]) {
  const int lane = threadIdx.x % 32, wm = threadIdx.x / 32 / 2 * 32, wn = threadIdx.x / 32 % 2 * 32;
#pragma unroll
  for (int kk = 0; kk < 64; kk += 16) {
    uint32_t fa[2][4], fb[2][4];
    for (int i = 0; i < 2; i++) load4(fa[i], at(sa, wm + i * 16 + lane % 16, kk + lane / 16 * 8));
    for (int j = 0; j < 2; j++) load4(fb[j], at(sb, wn + j * 16 + lane % 8 + lane / 16 * 8, kk + lane / 8 % 2 * 8));
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 4; j++) mma(acc[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
  }
}
__device__ __forceinline__ int pair_row(int p) { return threadIdx.x / 64 * 32 + p / 8 * 16 + p % 2 * 8 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int pair_column(int p) { return threadIdx.x / 32 % 2 * 32 + p / 2 % 4 * 8 + threadIdx.x % 4 * 2; }
__device__ __forceinline__ half2 pair(const float (&acc)[2][4][4], int p) {
  return __floats2half2_rn(acc[p / 8][p / 2 % 4][p % 2 * 2], acc[p / 8][p / 2 % 4][p % 2 * 2 + 1]);
}
extern "C" __global__ void __launch_bounds__(160) gemm(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                                                       half *c, int n, int k) {
  extern __shared__ __align__(1024) unsigned char memory[];
  half *boxes = reinterpret_cast<half *>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
  __shared__ __align__(8) uint64_t full[STAGES], empty[STAGES];
  const int row0 = blockIdx.y * 64, col0 = blockIdx.x * 64, rounds = k / 64;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) { bar_init(&full[s], 1); bar_init(&empty[s], 4); }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128)
      for (int i = 0; i < rounds; i++) {
        const int s = i % STAGES;
        if (i > 0) bar_wait(&full[(i - 1) % STAGES], (i - 1) / STAGES & 1);
        bar_expect(&full[s], 16384);
        tma_load(boxes + s * 8192, &map_a, i * 64, row0, &full[s]);
        tma_load(boxes + s * 8192 + 4096, &map_b, i * 64, col0, &full[s]);
      }
  } else {
    float acc[2][4][4] = {};
    for (int i = 0; i < rounds; i++) {
      const int s = i % STAGES;
      bar_wait(&full[s], i / STAGES & 1);
      multiply(boxes + s * 8192, boxes + s * 8192 + 4096, acc);
    }
    for (int p = 0; p < 16; p++)
      *reinterpret_cast<half2 *>(c + (long long)(row0 + pair_row(p)) * n + col0 + pair_column(p)) = pair(acc, p);
  }
}
