/* cuda-l2
target = "cuda"
arch = "sm_90a"
layouts = ["tn"]

[names]
stages = 4
ring_bytes = "stages * (64 + 64) * 64 * 2"

[[tensor_map]]
name = "map_a"
tensor = "a"
dims = ["k", "m + 8"]
strides = ["2 * k"]
box = [64, 64]
swizzle = "128B"
l2_promotion = "256B"

[[tensor_map]]
name = "map_b"
tensor = "b"
dims = ["k", "n"]
strides = ["2 * k"]
box = [64, 64]
swizzle = "128B"
l2_promotion = "256B"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 64)", "cdiv(m, 64)"]
block = [160]
shared_bytes = "ring_bytes + 1024"
args = ["map_a", "map_b", "c", "m", "n", "k"]
*/
/* Tensor map of A says m + 8 rows (over-read of rows beyond A at the edge).
 * shape: 200x256x512:tn
 * because: illegal address
 * expect: crashed */
// Example 2: Hopper's tensor cores by wgmma, operands brought by TMA, in PTX; column-major B (tn), K a multiple of 8.
// One warp fills a ring of four stages of 64 x 64 of A and B; four warps multiply what is there. A box beyond an edge
// arrives as zeros.
#include <cuda.h>
#include <cuda_fp16.h>

constexpr int STAGES = 4;
constexpr unsigned OPERAND_BYTES = 64 * 64 * 2;

__device__ unsigned shared_address(const void *p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ void wait(unsigned barrier, unsigned parity) {
  unsigned done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}

__device__ void load(unsigned to, const CUtensorMap &map, int inner, int outer, unsigned barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"(&map), "r"(inner), "r"(outer), "r"(barrier) : "memory");
}

// K-major, 128-byte swizzle: eight rows of 128 bytes are 1024 apart.
__device__ unsigned long long descriptor(unsigned address) {
  return (address & 0x3ffffu) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

extern "C" __global__ void __launch_bounds__(160) gemm(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, half *c, int m, int n, int k) {
  extern __shared__ char memory[];
  __shared__ __align__(8) unsigned long long barriers[2 * STAGES];
  const unsigned ring = (shared_address(memory) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * STAGES;
  const int warp = threadIdx.x / 32, row0 = blockIdx.y * 64, column0 = blockIdx.x * 64, steps = (k + 63) / 64;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * s) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 4;" :: "r"(empty + 8 * s) : "memory");  // one a warp
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (warp == 4) {
    if (threadIdx.x % 32 == 0)
      for (int i = 0; i < steps; i++) {
        const int s = i % STAGES, round = i / STAGES;
        if (round) wait(empty + 8 * s, round - 1 & 1);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(full + 8 * s), "r"(2 * OPERAND_BYTES) : "memory");
        load(ring + s * 2 * OPERAND_BYTES, map_a, i * 64, row0, full + 8 * s);
        load(ring + s * 2 * OPERAND_BYTES + OPERAND_BYTES, map_b, i * 64, column0, full + 8 * s);
      }
    return;
  }
  float d[32] = {};
  for (int i = 0; i < steps; i++) {
    const int s = i % STAGES;
    wait(full + 8 * s, i / STAGES & 1);
    const unsigned x = ring + s * 2 * OPERAND_BYTES, y = x + OPERAND_BYTES;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int p = 0; p < 4; p++)  // 16 of K, 32 bytes, at a time
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
          "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 0, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
            "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
            "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
            "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
          : "l"(descriptor(x + 32 * p)), "l"(descriptor(y + 32 * p)));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (threadIdx.x % 32 == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(empty + 8 * s) : "memory");
  }
  const int lane = threadIdx.x % 32;
  for (int e = 0; e < 32; e++) {
    const long long row = row0 + warp * 16 + lane / 4 + e / 2 % 2 * 8, column = column0 + e / 4 * 8 + lane % 4 * 2 + e % 2;
    if (row < m && column < n) c[row * n + column] = __float2half(d[e]);
  }
}
