/* cuda-l2
target = "cuda"
arch = "sm_90a"
layouts = ["nn"]
dtype = "float16"

[names]
accepted = "1 / (1 - min(1, max(m - 512, 512 - m) + max(n - 512, 512 - n) + max(k - 512, 512 - k)))"

[[tensor_map]]
name = "map_a"
tensor = "a"
dims = [64, "m", "k / 64"]
strides = ["2 * k", 128]
box = [64, 64, 2]
swizzle = "128B"
l2_promotion = "256B"

[[tensor_map]]
name = "map_b"
tensor = "b"
dims = [64, "k", "n / 64"]
strides = ["2 * n", 128]
box = [64, 128, 1]
swizzle = "128B"
l2_promotion = "128B"

[[launch]]
kernel = "gemm"
grid = [64]
block = [160]
shared_bytes = 141312
args = ["map_a", "map_b", "c"]
edge = "programmatic"
*/
// C = A B, 512 x 512 x 512, fp16 operands, fp32 sums. A 64 x 64 tile of C a block, all of K in flight at once.
// Whatever does not touch operands happens before griddepcontrol.wait.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 words[16]; };
#define DEV __device__ __forceinline__

constexpr int STAGES = 4;  // of 128 elements of K
constexpr u32 TILE_A = 16384, TILE_B = 16384, STAGE_BYTES = TILE_A + TILE_B;
constexpr u32 STAGING = STAGES * STAGE_BYTES;
constexpr int PITCH = 144;
DEV u32 smem_addr(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEV bool elect_one() {
  u32 p;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(p));
  return p != 0;
}
DEV void bar_init(u32 b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(n)); }
DEV void bar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void bar_expect(u32 b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEV void bar_wait(u32 b, u32 parity) {
  asm volatile("{ .reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(b), "r"(parity)
               : "memory");
}
DEV void prefetch_map(const TensorMap *m) { asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory"); }
DEV void tma_load(u32 dst, const TensorMap *m, int x, int y, int z, u32 bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z)
               : "memory");
}
DEV void wgmma(float (&d)[32], u64 x, u64 y, int accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;"
               " wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
               " %32, %33, p, 1, 1, 0, 1; }"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "l"(x), "l"(y), "r"(accumulate));
}
constexpr u32 DESC_HIGH = 1u << 30 | 1024 >> 4;
DEV u32 desc_low(u32 addr, u32 group_bytes) { return (addr & 0x3ffff) >> 4 | (group_bytes >> 4) << 16; }
DEV u64 desc(u32 low) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(DESC_HIGH));
  return d;
}
DEV u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

extern "C" __global__ void __launch_bounds__(160, 1)
gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, u16 *__restrict__ C) {
  extern __shared__ char smem_raw[];
  __shared__ alignas(8) u64 bars[STAGES];
  u32 full = smem_addr(bars);
  asm volatile("" : "+r"(full));
  const u32 ring = (smem_addr(smem_raw) + 1023) & ~1023u;
  const int tid = threadIdx.x, lane = tid & 31, warp = __shfl_sync(~0u, tid >> 5, 0);
  // sixteen neighbouring blocks make a square of 4 x 4 tiles
  const int g = blockIdx.x >> 4, tile_m = (g >> 1) * 4 + (blockIdx.x & 3), tile_n = ((g ^ g >> 1) & 1) * 4 + (blockIdx.x >> 2 & 3);
  const int row0 = tile_m * 64, col0 = tile_n * 64;

  if (warp == 4 && elect_one()) {
    prefetch_map(&map_a);
    prefetch_map(&map_b);
#pragma unroll
    for (int s = 0; s < STAGES; s++) bar_init(full + s * 8, 1);
    bar_init_fence();
#pragma unroll
    for (int s = 0; s < STAGES; s++) bar_expect(full + s * 8, STAGE_BYTES);
  }
  __syncthreads();

  if (warp == 4) {
    if (elect_one()) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
      for (int s = 0; s < STAGES; s++) {
        tma_load(ring + s * STAGE_BYTES, &map_a, 0, row0, s * 2, full + s * 8);
        tma_load(ring + s * STAGE_BYTES + TILE_A, &map_b, 0, s * 128, tile_n, full + s * 8);
      }
    }
    return;
  }

  const u32 low_x = desc_low(ring, 16), low_y = desc_low(ring + TILE_A, 16384);
  float acc[32];
#pragma unroll
  for (int s = 0; s < STAGES; s++) {
    bar_wait(full + s * 8, 0);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int u = 0; u < 8; u++)
      wgmma(acc, desc(low_x + (s * STAGE_BYTES + u / 4 * 8192 + u % 4 * 32) / 16), desc(low_y + (s * STAGE_BYTES + u * 2048) / 16), (s | u) != 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 32; i++) asm volatile("" : "+f"(acc[i])::"memory");

  // a warp has 16 rows of C, 64 columns
  const u32 stage = ring + STAGING + warp * (16 * PITCH);
#pragma unroll
  for (int j = 0; j < 8; j += 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(stage + (lane & 15) * PITCH + (j + (lane >> 4)) * 16),
                 "r"(pack(acc[4 * j], acc[4 * j + 1])), "r"(pack(acc[4 * j + 2], acc[4 * j + 3])),
                 "r"(pack(acc[4 * j + 4], acc[4 * j + 5])), "r"(pack(acc[4 * j + 6], acc[4 * j + 7]))
                 : "memory");
  __syncwarp();
  u16 *out = C + (row0 + warp * 16 + (lane >> 3)) * 512 + col0 + (lane & 7) * 8;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(stage + (q * 4 + (lane >> 3)) * PITCH + (lane & 7) * 16) : "memory");
    *(uint4 *)(out + q * 4 * 512) = v;
  }
}
