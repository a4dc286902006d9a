// C = A B of fp16 elements, or bf16 with BF16 = 1: one output tile, or one K part of it, a block; one launch, for outputs of about one wave of
// tiles, K parts included.
//
// X is the operand on the 64-row wgmma axis (BM rows a block), Y the one on the N axis (BN rows).
// SWAP = 0: X = A, Y = B^T. SWAP = 1: X = B^T, Y = A, and the tile is written transposed, which gives tiles of any multiple of 8
// rows of C. Row-major B is read as it lies, by MN-major descriptors.
//
// A warp of its own (a warpgroup, where registers are split) keeps a ring of STAGES tiles of 64 KB elements of K filled
// by TMA; NWG warpgroups multiply. Blocks of a cluster, rank = (ck * CN + cn) * CM + cm: CM x CN of them sit side by side
// in C and share operand loads by multicast; CK of them split K and reduce through distributed shared memory.
// SL = gridDim.z further parts of K are reduced through L2: all blocks must be resident at once. Every sum of parts is
// taken in fp32 in one fixed order.
//
// Four parts of the kernel's body are files included there, and no functions: they declare what the rest uses, and as
// functions that take a thread's sums two of them change the machine code of the main loop.
//
// Macros: the compiled choices of sm90_wave.py, BF16, LAYOUT_TN, NWG, and what the sizes of the task are multiples of: X_FLAT, Y_FLAT
// (inner sizes of the operands are no multiples of 64), EDGES (0: whole tiles; 1: C is cut off at multiples of 8 columns;
// 2: anywhere).
#include "sm90_wave_work.cuh"
#include "sm90_wave_load.cuh"
#include "sm90_wave_store.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MINB)
gemm(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_y,
#if CM * CN * CK * SL > 1
     const __grid_constant__ Order order,
#endif
     u16 *__restrict__ C,
#if SL > 1
     u32 *__restrict__ parts,
#endif
#if SL > 1 && COUNT
     u32 *__restrict__ counters,
#endif
     int M, int N, int K, int box_rows, int box_log2, int box_columns
#if PDL
     , int dependent  // launched so: only then do dependents of our own follow
#endif
) {
  extern __shared__ __align__(1024) char smem_raw[];  // so no address is rounded up before the first load
  __shared__ alignas(8) u64 bars[2 * STAGES + 1];
  const u32 full = smem_addr(bars), empty = full + STAGES * 8, inbox_bar = full + STAGES * 16, ring = smem_addr(smem_raw);
  const int tid = threadIdx.x, lane = tid & 31;
#if PDL == 1
  if (dependent) pdl_trigger();
#endif

#if CM * CN * CK * SL > 1
  const Order *const table = &order;
#else
  const Order *const table = nullptr;
#endif
  const Work work = find_work(box_rows, box_log2, box_columns, table, K);

  // ---- before the block's first barrier, whatever needs no other block is in flight. The vote instead of the warp's
  // number, which comes through a shuffle, is there sooner.
  auto load = [&](int step, int s, auto together) {
    load_stage<decltype(together)::value>(full, ring, s, &map_x, &map_y, work, step);
  };
  constexpr int EARLY = MULTI ? LOCAL : STAGES;  // most stages that are loaded before the barrier
#include "sm90_wave_begin.cuh"
  const int warp = __shfl_sync(~0u, tid >> 5, 0);
  __syncthreads();
  if (CS > 1) cluster_arrive();

  // ---- producer
  if (warp >= NC / 32) {
    if (SPLIT_REGS) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NWG == 3 ? 32 : 40));
    if (CS > 1) cluster_wait();
    if (warp == NC / 32 && elect_one()) {
      int i = least(work.n, EARLY);
      if (MULTI)
#pragma unroll 1
        for (; i < work.n && i < STAGES; i++) load(work.k0 + i, i, constant<true>());
      int s = 0;
      u32 parity = 0;
#pragma unroll 1
      for (; i < work.n; i++) {
        bar_wait(empty + s * 8, parity);
        load(work.k0 + i, s, constant<true>());
        if (++s == STAGES) s = 0, parity ^= 1;
      }
    }
    __syncwarp();
    // No block leaves while another may still signal its barriers.
    if (MULTI) {
      cluster_arrive();
      cluster_wait();
    }
    return;
  }

  // ---- consumers
  if (SPLIT_REGS) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NWG == 3 ? 160 : 232));
  if (CS > 1) cluster_wait();  // all peers are there, with their barriers armed; the first operands take longer
  const int wg = warp >> 2, cm = work.cm, cn = work.cn, ck = work.ck, sl = work.sl;
  Sum acc[MW][WORDS];
  const u32 low_x = desc_low(ring, X_MN ? KB * 8192 : 16) + operand_at<X_MN, KB, BM>(1, 0, 0) * (wg * MW);
  const u32 low_y = desc_low(ring + X_BYTES, Y_MN ? KB * 8192 : 16);

  // ---- what follows the products is worked out now, while the first operands are on their way: the compiler would do it
  // last, when everything waits for it
  const int wrow = work.row0 + wg * MW * 64 + (warp & 3) * 16;  // first row (column, if swapped) of this warp in slab 0
  const int first = ck * RK + sl * RL;                          // the thread's sums that this block stores
  const Way way = way_of_share(C, M, N, first, wrow, work.col0, ring + warp * (STAGED_BYTES / (NC / 32)), lane);
#include "sm90_wave_owners.cuh"
#if SL > 1
  const int cluster = blockIdx.y * (gridDim.x / CS) + blockIdx.x / CS;
  const int unit = ((cluster * CN + cn) * CM + cm) * CK + ck;
  u32 *const box = parts + (u64)unit * SL * (SL - 1) * RL * NC + tid * VL;
  u32 *const to = box + sl * RL * NC, *const from = box + sl * (SL - 1) * RL * NC;
#endif

  const bool reuse = work.n > STAGES;
  auto release = [&](int s) { release_stage(empty, s, tid, cm, cn, ck); };
  int s = 0, before = 0;
  u32 parity = 0;
#pragma unroll 1  // here and above: a short kernel feels every instruction-cache miss
  for (int i = 0; i < work.n; i++) {
    bar_wait(full + s * 8, parity);
    const u32 x = low_x + s * (STAGE_BYTES >> 4), y = low_y + s * (STAGE_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int u = 0; u < KB; u++)
#pragma unroll
      for (int k16 = 0; k16 < 4; k16++)
#pragma unroll
        for (int m = 0; m < MW; m++)
          wgmma(acc[m], desc(x + operand_at<X_MN, KB, BM>(m, u, k16)), desc(y + operand_at<Y_MN, KB, BN>(0, u, k16)), (i | u | k16) != 0);
    wgmma_commit();
    if (reuse) {  // one step late: the tensor cores never drain
      wgmma_wait<1>();
      if (i > 0) release(before);
      before = s;
    }
    if (++s == STAGES) s = 0, parity ^= 1;
  }
#if PDL == 2
  if (dependent) pdl_trigger();
#endif
  wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < MW; m++)
#pragma unroll
    for (int i = 0; i < WORDS; i++) pin(acc[m][i]);
  if (MULTI) cluster_arrive();  // nobody signals us after this; the wait is at the very end
  named_sync(1, NC);            // the ring becomes staging space: every wgmma of the block has read it

  // ---- sums over the parts of K, and C
  if constexpr (PLAIN) {
#pragma unroll
    for (int m = 0; m < MW; m++) store_part<BN>(way, N, acc[m], m * 64, lane);
  } else {
    float own[RK], sum[R];
#pragma unroll
    for (int m = 0; m < MW; m++)
#pragma unroll
      for (int i = 0; i < WORDS; i++) widen(acc[m][i], &sum[m * NA + i * (NA / WORDS)]);
#include "sm90_wave_cluster_sum.cuh"
    float out[RL];
#if SL > 1
#include "sm90_wave_exchange.cuh"
#else
#pragma unroll
    for (int i = 0; i < RL; i++) out[i] = own[i];
#endif
    store_share(way, C, M, N, out, first, wrow, work.col0, lane);
  }
  if (MULTI) cluster_wait();
}
