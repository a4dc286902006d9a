// C = A B of fp16 elements, or bf16 with BF16 = 1, where rows of A, B or C are no multiples of 16 bytes. A tensor map demands
// that of rows, and a load by TMA of the address where its box begins (elsewhere the device reports an illegal instruction),
// so that no view of such rows helps.
//
// `pad` copies such operands first, so that their rows begin at multiples of 16 bytes; what it puts between them is never
// read. The copy stays in L2 where it fits. `gemm` begins while `pad` runs and waits for it before the first load. Operands
// whose rows are whole are read where they lie; where both are, `gemm` is launched alone.
//
// Persistent blocks: a warp (a warpgroup, where registers are split) keeps a ring of STAGES tiles of 64 KB elements of K
// filled by TMA, NWG warpgroups multiply and store, from tile to tile. CK blocks of a cluster split K, then there is one
// tile a cluster. C is stored from shared memory, as many elements at once as the alignment of its rows allows.
//
// Macros: the compiled choices of sm90_ragged.py, BF16, LAYOUT_TN, NWG.
#define SWAP 0
#define ACC 32
#define PDL 2
#include "sm90_sums.cuh"

constexpr int MW = BM / 64 / NWG;  // 64-row slabs a warpgroup
constexpr int R = MW * NA, RK = R / CK, VK = 4;  // sums a thread, of which it owns RK after the cluster's sum
// setmaxnreg needs the producer to be a whole warpgroup; few sums do without.
constexpr bool SPLIT_REGS = R >= 128 && NWG > 1;
constexpr int THREADS = NC + (SPLIT_REGS ? 128 : 32);
constexpr int CM = 1, CN = 1;  // no multicast
constexpr bool MULTI = false;
constexpr u32 X_BYTES = KB * BM * 128, STAGE_BYTES = X_BYTES + KB * BN * 128;
constexpr u32 INBOX_BYTES = (CK - 1) * RK * NC * 4;
constexpr int PITCH = BN * 2 + 16;  // bytes of a row of C in shared memory
static_assert(BM % (64 * NWG) == 0 && BN % 16 == 0 && (LAYOUT_TN || BN % 64 == 0), "tile");
static_assert(R % CK == 0 && RK % 4 == 0 && (RK >= NA ? RK % NA == 0 : NA % RK == 0), "a block's share is part of a slab, or whole slabs");

#include "sm90_ragged_pad.cuh"
// ---- C
DEV u16 ld_shared_u16(u32 at) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}

#include "sm90_ragged_rows.cuh"
// A warp's 16 x W part of C, from row0 and col0 on.
template <int W> DEV void store_part(u16 *C, int M, int N, const float *sums, int row0, int col0, u32 stage, int lane) {
#pragma unroll
  for (int j = 0; j < W / 8; j += 2)
    if (j + 1 < W / 8)
      stmatrix4<false>(stage + (lane & 15) * PITCH + (j + (lane >> 4)) * 16, pair(sums, 2 * j), pair(sums, 2 * j + 1),
                       pair(sums, 2 * j + 2), pair(sums, 2 * j + 3));
    else
      stmatrix2<false>(stage + (lane & 15) * PITCH + j * 16, pair(sums, 2 * j), pair(sums, 2 * j + 1));
  __syncwarp();
  if (N % 8 == 0) store_rows<W, 8>(C, M, N, row0, col0, stage, lane);
  else if (N % 2 == 0) store_rows<W, 2>(C, M, N, row0, col0, stage, lane);
  else store_rows<W, 1>(C, M, N, row0, col0, stage, lane);
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS, MINB)
gemm(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_y, u16 *__restrict__ C, int M, int N, int K,
     int band_rows, int dependent) {  // dependent: the call may be followed by one that begins early
  extern __shared__ char smem_raw[];
  __shared__ alignas(8) u64 bars[2 * STAGES + 1];
  const u32 full = smem_addr(bars), empty = full + STAGES * 8, inbox_bar = full + STAGES * 16;
  const u32 ring = (smem_addr(smem_raw) + 1023) & ~1023u;
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), lane = tid & 31;

  const int group = blockIdx.x / CK, hop = gridDim.x / CK, ck = CK > 1 ? blockIdx.x % CK : 0, cm = 0, cn = 0;
#include "sm90_ragged_tiles.cuh"
  const int k0 = ck * share + least(ck, extra), n = share + (ck < extra ? 1 : 0);
  // Tile t: bands of band_rows tile rows are walked across, so that the tiles in flight share operands in L2.
  auto place = [&](int t, int &row0, int &col0) {
    const int band = t / (band_rows * gn), i = t - band * band_rows * gn, height = least(band_rows, gm - band * band_rows);
    row0 = (band * band_rows + i % height) * BM;
#include "sm90_ragged_column.cuh"
  };

  if (warp == NC / 32 && elect_one()) {
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      bar_init(full + s * 8, 1);
      bar_init(empty + s * 8, NWG);
    }
    if (CK > 1) bar_init(inbox_bar, 1);
    bar_init_fence();
  }
  __syncthreads();
  if (CK > 1) {
    if (tid == 0) bar_expect(inbox_bar, INBOX_BYTES);
    cluster_arrive();
  }

  // ---- producer
  if (warp >= NC / 32) {
    if (SPLIT_REGS) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (CK > 1) cluster_wait();
    if (warp == NC / 32 && elect_one()) {
      pdl_wait();
      int s = 0;
      u32 parity = 1;  // a fresh barrier passes a wait for parity 1
#pragma unroll 1
      for (int t = group; t < tiles; t += hop) {
        int row0, col0;
        place(t, row0, col0);
#pragma unroll 1
        for (int i = 0; i < n; i++) {
          bar_wait(empty + s * 8, parity);
          const u32 bar = full + s * 8, x = ring + s * STAGE_BYTES;
          bar_expect(bar, STAGE_BYTES);
#include "sm90_ragged_load.cuh"
          if (++s == STAGES) s = 0, parity ^= 1;
        }
      }
    }
    __syncwarp();
    return;
  }

  // ---- consumers
  if (SPLIT_REGS) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int wg = warp >> 2, line = wg * (MW * 64) + (warp & 3) * 16;  // the warp's first row of the tile in slab 0
  Sum acc[MW][WORDS];
  const u32 low_x = desc_low(ring, 16) + operand_at<X_MN, KB, BM>(1, 0, 0) * (wg * MW);
  const u32 low_y = desc_low(ring + X_BYTES, Y_MN ? KB * 8192 : 16);
  const u32 stage = ring + STAGES * STAGE_BYTES + INBOX_BYTES + warp * (16 * PITCH);
  auto release = [&](int s) {
    if ((tid & 127) == 0) bar_arrive(empty + s * 8);
  };
  if (CK > 1) cluster_wait();
#include "sm90_wave_owners.cuh"
  int s = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int t = group; t < tiles; t += hop) {
    int before = 0;
#pragma unroll 1
    for (int i = 0; i < n; i++) {
      bar_wait(full + s * 8, parity);
#include "sm90_ragged_whole.cuh"
      const u32 y = low_y + s * (STAGE_BYTES >> 4);
      const u32 x = low_x + s * (STAGE_BYTES >> 4);
      wgmma_fence();
#pragma unroll
      for (int u = 0; u < KB; u++)
#pragma unroll
        for (int k16 = 0; k16 < 4; k16++)
#pragma unroll
          for (int m = 0; m < MW; m++)
            wgmma(acc[m], desc(x + operand_at<X_MN, KB, BM>(m, u, k16)), desc(y + operand_at<Y_MN, KB, BN>(0, u, k16)), (i | u | k16) != 0);
      wgmma_commit();
      wgmma_wait<1>();  // a stage is released one step late: the tensor cores never drain
      if (i > 0) release(before);
      before = s;
      if (++s == STAGES) s = 0, parity ^= 1;
    }
    if (dependent && t + hop >= tiles) pdl_trigger();
    wgmma_wait<0>();
    release(before);
#pragma unroll
    for (int m = 0; m < MW; m++)
#pragma unroll
      for (int i = 0; i < WORDS; i++) pin(acc[m][i]);

    int row0, col0;
    place(t, row0, col0);
    if constexpr (CK == 1) {
#pragma unroll
      for (int m = 0; m < MW; m++) store_part<BN>(C, M, N, acc[m], row0 + line + m * 64, col0, stage, lane);
    } else {
      float own[RK], sum[R];
#pragma unroll
      for (int m = 0; m < MW; m++)
#pragma unroll
        for (int i = 0; i < NA; i++) sum[m * NA + i] = acc[m][i];
#include "sm90_wave_cluster_sum.cuh"
      const int first = ck * RK;
      if constexpr (RK >= NA) {
#pragma unroll
        for (int m = 0; m < RK / NA; m++) store_part<BN>(C, M, N, own + m * NA, row0 + line + (first / NA + m) * 64, col0, stage, lane);
      } else {
        store_part<RK * 2>(C, M, N, own, row0 + line + first / NA * 64, col0 + first % NA * 2, stage, lane);
      }
    }
  }
}
