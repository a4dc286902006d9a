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
block = [256]
args = ["map_a", "map_b", "c", "n", "k"]
shared_bytes = 66560
*/
/* Control: wgmma with one group in flight; all threads hand back the slice before the one that it reads.
 * shape: 512x512x512:tn
 * verify: full
 * expect: measured */
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
__device__ __forceinline__ void bar_arrive(uint64_t *bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address(bar)) : "memory");
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
__device__ __forceinline__ uint64_t descriptor(const void *p) {
  return (uint64_t)((address(p) & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t da, uint64_t db) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 0, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) : "l"(da), "l"(db));
}
extern "C" __global__ void __launch_bounds__(256) gemm(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                                                       half *c, int n, int k) {
  extern __shared__ __align__(1024) unsigned char memory[];
  half *boxes = reinterpret_cast<half *>((reinterpret_cast<uintptr_t>(memory) + 1023) / 1024 * 1024);
  __shared__ __align__(8) uint64_t full[STAGES], empty[STAGES];
  const int row0 = blockIdx.y * 64, col0 = blockIdx.x * 64, rounds = k / 64;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) { bar_init(&full[s], 1); bar_init(&empty[s], 128); }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (threadIdx.x == 128)
      for (int i = 0; i < rounds; i++) {
        const int s = i % STAGES;
        if (i >= STAGES) bar_wait(&empty[s], (i / STAGES - 1) & 1);
        bar_expect(&full[s], 16384);
        tma_load(boxes + s * 8192, &map_a, i * 64, row0, &full[s]);
        tma_load(boxes + s * 8192 + 4096, &map_b, i * 64, col0, &full[s]);
      }
  } else {
    float d[32] = {};
    for (int i = 0; i < rounds; i++) {
      const int s = i % STAGES;
      bar_wait(&full[s], i / STAGES & 1);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int kk = 0; kk < 4; kk++) wgmma(d, descriptor(boxes + s * 8192 + kk * 16), descriptor(boxes + s * 8192 + 4096 + kk * 16));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (i > 0) bar_arrive(&empty[(i - 1) % STAGES]);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    const int lane = threadIdx.x % 32, row = row0 + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      half *to = c + (long long)row * n + col0 + j * 8 + lane % 4 * 2;
      *reinterpret_cast<half2 *>(to) = __floats2half2_rn(d[j * 4], d[j * 4 + 1]);
      *reinterpret_cast<half2 *>(to + 8ll * n) = __floats2half2_rn(d[j * 4 + 2], d[j * 4 + 3]);
    }
  }
}
