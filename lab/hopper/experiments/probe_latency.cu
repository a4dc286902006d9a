// What a block pays before its operands are in shared memory, by way of loading. One mode a build.
// 0 empty; 1 ld.global; 2 TMA; 3 cp.async, same addresses; 4 cluster barrier, then multicast TMA; 5 TMA, cluster barrier
// behind it; 6 cluster barrier only. BOXES boxes of 64 rows x 64 fp16 a block; SHARE blocks read the same rows.
#include "ptx.cuh"
#ifndef MODE
#define MODE 2
#endif
#ifndef BOXES
#define BOXES 1
#endif
#ifndef SHARE
#define SHARE 1
#endif
#ifndef CM
#define CM 1
#endif
extern "C" __global__ void __launch_bounds__(128)
gemm(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_y,
     const __grid_constant__ CUtensorMap map_c, half* __restrict__ C, const half* __restrict__ A,
     unsigned* __restrict__ counters, int M, int N, int K, int raster_m, int pdl) {
  extern __shared__ char smem_raw[];
  __shared__ __align__(8) uint64_t bar[1];
  const uint32_t ring = (smem_addr(smem_raw) + 1023) & ~1023u, b = smem_addr(bar);
  const int tid = threadIdx.x, row0 = blockIdx.x / SHARE * 64;
  uint4 v = make_uint4(1, 2, 3, 4);
  if (MODE == 1) v = __ldg((const uint4*)(A + blockIdx.x * 4096) + tid);
  if (MODE == 3) {
    for (int b = 0; b < BOXES; b++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(ring + b * 8192 + (i * 128 + tid) * 16), "l"((const char*)(A + (size_t)(row0 + i * 16 + tid / 8) * K) + b * 128 + tid % 8 * 16) : "memory");
    asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
  }
  if (MODE == 2 || MODE == 4 || MODE == 5) {
    if (tid == 0) {
      bar_init(b, 1); bar_init_fence(); bar_expect(b, 8192 * BOXES);
      if (MODE != 4) for (int i = 0; i < BOXES; i++) tma_load(ring + i * 8192, &map_x, 0, row0, i, b);
    }
    __syncthreads();
    if (MODE == 4 || MODE == 5) { cluster_arrive(); cluster_wait(); }
    // both blocks of a cluster need the same boxes; each fetches every other one for both
    if (MODE == 4 && tid == 0)
      for (int i = cluster_rank(); i < BOXES; i += 2) tma_load_multicast(ring + i * 8192, &map_x, 0, row0, i, b, 3);
    bar_wait(b, 0);
  }
  if (MODE == 6) { cluster_arrive(); cluster_wait(); }
  if (MODE >= 2 && MODE != 6) asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(ring + tid * 16) : "memory");
  if (MODE != 0) *((uint4*)C + blockIdx.x * 128 + tid) = v;
  if (MODE == 4) { cluster_arrive(); cluster_wait(); }
}
