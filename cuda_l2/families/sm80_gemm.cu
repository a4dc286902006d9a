// C = A B by mma.sync.m16n8k16 on every GPU from compute capability 8.0 on, any M, N, K, B row-major or column-major.
// A, B and C are fp16, or bf16 with BF16 = 1.
//
// A block of WARPS_M x WARPS_N x WARPS_K warps computes BM x BN of C; warps along K share a tile and add up last.
// LOAD says how operands reach the tensor cores:
//   0  straight from global memory to registers, BK of K at once: for few, small tiles;
//   1  through one buffer of shared memory and registers, no pipeline: the light path;
//   2  a ring of STAGES buffers filled by cp.async.
// Rows not aligned to 16 bytes are copied in narrower pieces (K_VECTOR, N_VECTOR elements); 2-byte pieces, which cp.async
// cannot copy, go through registers.
#ifndef LOAD  // a schedule to compile alone; the choices are explained in sm80_gemm.py
#define LOAD 2
#define ACC16 0           // sums in fp16
#define BM 128
#define BN 128
#define WARPS_M 2
#define WARPS_N 2
#define WARPS_K 1
#define BK 32
#define STAGES 4
#define SPLIT_K 1         // blocks that share a tile along K
#define SWIZZLE_BITS 3
#define SWIZZLE_BASE 3
#define SWIZZLE_SHIFT 3
#define RASTER 0          // neighbouring blocks along N (0) or M (1)
#define BLOCK_SWIZZLE 0   // width in elements of the strips that blocks sweep, 0 for none
#define DOUBLE_BUFFER 1
#define PREFETCH 1        // k16 steps that fragments are loaded ahead
#define STAGGER 0         // B's fragments are loaded after the multiplications, not before
#define EPILOGUE 1        // stores of pairs (0), wide stores from registers (1), through shared memory (2)
#define MIN_BLOCKS 1
#define PDL 0             // dependent launch: 1 lets the next kernel begin at once, 2 after the main loop
#define BF16 0            // what the task fixes
#define LAYOUT_TN 0
#define K_VECTOR 1
#define N_VECTOR 1
#define WHOLE_M 0
#define WHOLE_N 0
#define WHOLE_K 0
#define ONE_TRIP 0        // K is at most BK
#endif

#if BF16
#include <cuda_bf16.h>
using Element = __nv_bfloat16;
#else
#include <cuda_fp16.h>
using Element = half;
#endif

constexpr int THREADS = 32 * WARPS_M * WARPS_N * WARPS_K;
constexpr int WARP_M = BM / WARPS_M, WARP_N = BN / WARPS_N, WARP_K = BK / WARPS_K;  // a warp's part of a trip
constexpr int MI = WARP_M / 16, NI = WARP_N / 8;  // 16 x 8 pieces of C a warp computes
static_assert(WARP_M % 16 == 0 && WARP_N % (LOAD ? 16 : 8) == 0 && WARP_K % (LOAD ? 16 : 32) == 0, "whole pieces");
static_assert((K_VECTOR & (K_VECTOR - 1)) == 0 && (N_VECTOR & (N_VECTOR - 1)) == 0, "vectors of 1, 2, 4 or 8 elements");

#if ACC16
using Sums = unsigned[MI][NI][2];
#else
using Sums = float[MI][NI][4];
#endif

// Where a warp stands in its block, and a thread in its warp.
struct Warp {
  int lane = threadIdx.x % 32, k = threadIdx.x / 32 % WARPS_K, n = threadIdx.x / 32 / WARPS_K % WARPS_N,
      m = threadIdx.x / 32 / WARPS_K / WARPS_N;
  int group = lane / 4, quad = lane % 4;  // of an mma fragment: row and pair of columns
};

// What a block computes: C from (row, column), K from k0 in trips of BK.
struct Work {
  int row, column, k0, trips;
};

#include "sm80_ptx.cuh"
#include "sm80_store.cuh"
#if LOAD == 0
#include "sm80_direct.cuh"
#else
#include "sm80_staged.cuh"
#endif

// Blocks lie along x first, then y. With BLOCK_SWIZZLE, z counts strips of that many columns (rows if RASTER), and a
// strip is swept before the next begins; blocks of the last strip may stick out of C: false.
DEVICE bool find_work(Work &work, int m, int n, int k) {
  int along = blockIdx.x;
  if (BLOCK_SWIZZLE) along += blockIdx.z / SPLIT_K * gridDim.x;
  work.row = (RASTER ? along : blockIdx.y) * BM;
  work.column = (RASTER ? blockIdx.y : along) * BN;
  const int trips = ONE_TRIP ? 1 : (k + BK - 1) / BK, share = (trips + SPLIT_K - 1) / SPLIT_K;
  const int first = SPLIT_K > 1 ? blockIdx.z % SPLIT_K * share : 0;
  work.k0 = first * BK;
  work.trips = SPLIT_K > 1 ? min(share, trips - first) : trips;
  return !BLOCK_SWIZZLE || (RASTER ? work.row < m : work.column < n);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    gemm(const Element *a, const Element *b, Output *out, int m, int n, int k DEPENDENT) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Warp warp;
  Work work;
  const bool inside = find_work(work, m, n, k);
#if PDL == 1
  if (dependent) let_next_kernel_begin();
#endif
  wait_for_kernel_before();
  if (!inside) return;
  Sums sums = {};
#if LOAD == 0
  direct(sums, a, b, m, n, k, warp, work);
#else
  staged(sums, shared, a, b, m, n, k, warp, work);
#endif
#if PDL == 2
  if (dependent) let_next_kernel_begin();
#endif
  finish(sums, shared, out, m, n, warp, work);
}
