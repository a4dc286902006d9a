// FAILED EXPERIMENT, kept for the record: slower than gemm_wave.cu for K > 64 and than gemm_mma.cu for K = 64.
// C = A B for short K: all of a block's operands fit in shared memory and are requested at once, by cp.async rather than
// TMA. The first byte arrives about 0.13 us sooner (no tensor map to fetch), which is what a 2 us kernel notices.
// fp16 in and out, fp32 accumulation, one BM x BN tile a block, every thread both loads and multiplies. B is [N, K].
#include "ptx.cuh"
#include "wgmma.cuh"
#include "epilogue.cuh"
#include "order.cuh"

#ifndef BM
#define BM 64
#endif
#ifndef BN
#define BN 32
#endif
#ifndef NWG        // warpgroups along BM
#define NWG 1
#endif
#ifndef KWG        // warpgroups along K: each takes every KWG-th 64 elements of K
#define KWG 1
#endif
#ifndef MINB
#define MINB 1
#endif

constexpr int MW = BM / 64 / NWG, NA = BN / 2, NT = NWG * KWG * 128, GROUP = NWG * 128;
constexpr uint32_t X_BYTES = BM * 128, STEP_BYTES = (BM + BN) * 128;
constexpr int PER_ROW_PASS = GROUP / 8;  // rows a warpgroup set loads in one go, 8 chunks of 16 bytes a row
constexpr int X_PASSES = BM / PER_ROW_PASS, Y_PASSES = (BN + PER_ROW_PASS - 1) / PER_ROW_PASS;
constexpr int MAX_STEPS = 32;
static_assert(BM % (64 * NWG) == 0 && BN % 8 == 0, "tile");

DEV void cp16(uint32_t dst, const half* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(dst), "l"(src) : "memory");
}

extern "C" __global__ void __launch_bounds__(NT, MINB)
gemm(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_y,
     const __grid_constant__ CUtensorMap map_c, half* __restrict__ C, const half* __restrict__ A,
     const half* __restrict__ B, int M, int N, int K, int unused, int pdl, const __grid_constant__ Order<264> order) {
  extern __shared__ char smem_raw[];
  __shared__ __align__(8) uint64_t bars[MAX_STEPS];
  const uint32_t base = (smem_addr(smem_raw) + 1023) & ~1023u, full = smem_addr(bars);
  const int tid = threadIdx.x, lane = tid & 31, kw = tid / GROUP, t = tid % GROUP;
  if (pdl == 0) pdl_trigger();
  const int tile = order.at[blockIdx.x], row0 = (tile & 255) * BM, col0 = (tile >> 8) * BN, steps = K / 64;
  if (tid < steps) { bar_init(full + tid * 8, GROUP); }
  const int row = t / 8, chunk = t % 8;
  const half* x = A + (size_t)(row0 + row) * K + chunk * 8;
  const half* y = B + (size_t)(col0 + row) * K + chunk * 8;
  const size_t hop = (size_t)PER_ROW_PASS * K;
  const uint32_t dst = base + row * 128 + ((chunk ^ (row & 7)) << 4);  // 128-byte swizzle; the hop is a multiple of 8 rows
  pdl_wait();
  __syncthreads();
  for (int s = kw; s < steps; s += KWG) {
    const uint32_t d = dst + s * STEP_BYTES;
#pragma unroll
    for (int i = 0; i < X_PASSES; i++) cp16(d + i * PER_ROW_PASS * 128, x + i * hop + s * 64);
#pragma unroll
    for (int i = 0; i < Y_PASSES; i++)
      if (BN % PER_ROW_PASS == 0 || row + i * PER_ROW_PASS < BN) cp16(d + X_BYTES + i * PER_ROW_PASS * 128, y + i * hop + s * 64);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(full + s * 8) : "memory");
  }
  const int warp = t >> 5, wg = warp >> 2;
  float acc[MW][NA];
  constexpr uint64_t DESC = (uint64_t)1 << 62 | (uint64_t)64 << 32 | (uint64_t)1 << 16;
  for (int s = kw; s < steps; s += KWG) {
    bar_wait(full + s * 8, 0);
    proxy_fence();  // cp.async wrote through the generic proxy, the tensor cores read through the async one
    const uint32_t xs = base + s * STEP_BYTES + wg * (MW * 8192), ys = base + s * STEP_BYTES + X_BYTES;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int m = 0; m < MW; m++)
        Wgmma<BN, 0>::mma(acc[m], DESC | ((xs + m * 8192 + k * 32) >> 4), DESC | ((ys + k * 32) >> 4), (s - kw) | k);
    wgmma_commit();
  }
  if (pdl == 1) pdl_trigger();
  wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < MW; m++)
#pragma unroll
    for (int i = 0; i < NA; i++) asm volatile("" : "+f"(acc[m][i]) :: "memory");
  __syncthreads();
  if constexpr (KWG > 1) {
    // the last sets hand their sums to the first through shared memory
    constexpr int V = 4;
    static_assert(NA % V == 0, "");
    if (kw > 0) {
#pragma unroll
      for (int m = 0; m < MW; m++)
#pragma unroll
        for (int i = 0; i < NA; i += V)
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(base + ((((kw - 1) * MW + m) * NA + i) * GROUP + t * V) * 4), "f"(acc[m][i]), "f"(acc[m][i + 1]), "f"(acc[m][i + 2]), "f"(acc[m][i + 3]) : "memory");
    }
    __syncthreads();
    if (kw > 0) return;
#pragma unroll
    for (int j = 0; j < KWG - 1; j++)
#pragma unroll
      for (int m = 0; m < MW; m++)
#pragma unroll
        for (int i = 0; i < NA; i += V) {
          float v[4];
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(base + (((j * MW + m) * NA + i) * GROUP + t * V) * 4) : "memory");
#pragma unroll
          for (int e = 0; e < V; e++) acc[m][i + e] += v[e];
        }
    named_sync(1, GROUP);
  }
  const uint32_t stage = base + warp * (16 * (BN * 2 + 16));
#pragma unroll
  for (int m = 0; m < MW; m++) store_rows<BN>(C, N, acc[m], row0 + wg * MW * 64 + m * 64 + (warp & 3) * 16, col0, stage, lane);
}
