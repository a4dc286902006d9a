// C = A B of fp16 elements, or bf16 with BF16 = 1, for several tiles a block: persistent blocks, epilogue overlapped.
//
// One producer warpgroup and NWG consumer warpgroups. PINGPONG = 0: they share one BM x BN tile (64-row slabs each);
// PINGPONG = 1: two warpgroups with a tile each, so that one stores while the other multiplies.
// CM x CN blocks of a cluster sit side by side in C and share operand loads by multicast.
// Tile sizes need not divide C: TMA fills loads with zeros and clips stores at the edges.
// Epilogue: stmatrix to shared memory, then asynchronous TMA stores. Per warp (no barrier at all) or, with WGSTORE = 1,
// per warpgroup in 64-row boxes, which is what shapes bound by the store of C want.
//
// Macros: the compiled choices of sm90_persistent.py, BF16, LAYOUT_TN, NWG, and X_FLAT, Y_FLAT (inner sizes of the operands are no
// multiples of 64). X and Y are as in sm90_wave.cu; so is row-major B.
#include "sm90_multicast.cuh"
#include "sm90_sums.cuh"

constexpr int MW = BM / 64 / (PINGPONG ? 1 : NWG);  // 64-row slabs a warpgroup
constexpr u32 X_BYTES = BM * 128, STAGE_BYTES = X_BYTES + BN * 128;
constexpr int READERS = PINGPONG ? 1 : NWG;  // warpgroups that read one stage
// Columns of C a warp stages and stores at once: 64 with the 128-byte swizzle, else plain rows, at most 2-way conflicts.
constexpr int CW = BN % 64 == 0 ? 64 : BN % 80 == 0 ? 80 : BN;
constexpr u32 CHUNK_BYTES = 16 * CW * 2;
constexpr u32 OUT_BYTES = SWAP || WGSTORE ? BN * 128 : 4 * CHUNK_BYTES;  // a warpgroup's staging buffer
static_assert(BN % 8 == 0 && BM % 64 == 0 && (!SWAP || BN % 16 == 0) && (!PINGPONG || NWG == 2), "tile");
static_assert(BM / CN % (X_MN ? 64 : 8) == 0 && BN / CM % (Y_MN ? 64 : 8) == 0, "slices of a multicast");
static_assert(!WGSTORE || (BN % 64 == 0 && !SWAP), "64-column boxes");

// a / b for the divisor whose 2^40 / b + 1 is given; a * b below 2^40.
DEV int quotient(int a, u64 inverse) { return (int)((u64)a * inverse >> 40); }

extern "C" __global__ void __launch_bounds__(NC + 128, 1)
gemm(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_y,
     const __grid_constant__ TensorMap map_c, int M, int N, int K, int columns, int band_width, int by_gpc,
     u64 band_inverse, u64 width_inverse, u64 rest_inverse
#if PDL
     , int dependent  // launched so: only then do dependents of our own follow
#endif
) {
  extern __shared__ __align__(1024) char smem_raw[];  // so no address is rounded up
  __shared__ alignas(8) u64 bars[2 * STAGES];
  const u32 full = smem_addr(bars), empty = full + STAGES * 8, ring = smem_addr(smem_raw), staging = ring + STAGES * STAGE_BYTES;
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), lane = tid & 31;
  const int rank = blockIdx.x % SHARING, cm = rank % CM, cn = rank / CM;
  const int rows = SWAP ? N : M, cols = SWAP ? M : N;
  const int gm = (rows + BM * CM - 1) / (BM * CM), gn = (cols + BN * CN - 1) / (BN * CN), tiles = gm * gn, steps = (K + 63) / 64;
#if PDL == 1
  if (dependent) pdl_trigger();
#endif

  // Tile t. Bands of band_width rows of cluster tiles (of columns) are walked across, so that the tiles in flight share
  // operands in L2; the last band may be narrower. The contract gives inverses of a band's tiles, its width and the rest's.
  auto place = [&](int t, int &row0, int &col0) {
    const int length = columns ? gm : gn, total = columns ? gn : gm;
    const int band = quotient(t, band_inverse), start = band * band_width, i = t - start * length;
    const int width = least(band_width, total - start);
    const int along = quotient(i, width == band_width ? width_inverse : rest_inverse), across = start + i - along * width;
    row0 = ((columns ? along : across) * CM + cm) * BM;
    col0 = ((columns ? across : along) * CN + cn) * BN;
  };
  // Pairs are placed round robin over the chip's 8 groups of multiprocessors: by_gpc gives neighbours in a group
  // neighbouring tiles. Blocks on their own fill group after group and have them already.
  const int cluster = blockIdx.x / SHARING, stride = gridDim.x / SHARING;
  const int mine_first = by_gpc ? cluster % 8 * (stride / 8) + least(cluster % 8, stride % 8) + cluster / 8 : cluster;

  const u16 mask_x = (u16)((((1u << SHARING) - 1) / ((1u << CM) - 1)) << cm), mask_y = (u16)(((1u << CM) - 1) << (cn * CM));
  if (warp == NC / 32 && elect_one()) {
    prefetch_map(&map_x);
    prefetch_map(&map_y);
    prefetch_map(&map_c);
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      bar_init(full + s * 8, 1);
      bar_init(empty + s * 8, READERS * (CM + CN - 1));
    }
    bar_init_fence();
  }
  __syncthreads();
  if (MULTI) {
    cluster_arrive();
    cluster_wait();
  }

  if (warp >= NC / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NWG == 3 ? 32 : 40));
    if (warp == NC / 32 && elect_one()) {
      int s = 0;
      u32 parity = 1;  // a fresh barrier passes a wait for parity 1
#if PDL
      bool waits = dependent;
#endif
#pragma unroll 1
      for (int t = mine_first; t < tiles; t += stride) {
        int row0, col0;
        place(t, row0, col0);
#if PDL  // once, and behind a branch: else the compiler works out the first tile's place after the wait
        if (waits) pdl_wait();
        waits = false;
#endif
#pragma unroll 1
        for (int k = 0; k < steps; k++) {
          bar_wait(empty + s * 8, parity);
          const u32 bar = full + s * 8, x = ring + s * STAGE_BYTES;
          bar_expect(bar, STAGE_BYTES);
          load_slice<X_MN, X_FLAT, 1, BM, BM / CN, CN != 1, CN != 1>(x, &map_x, row0, CN > 1 ? cn * (BM / CN) : 0, k, bar, mask_x);
          load_slice<Y_MN, Y_FLAT, 1, BN, BN / CM, CM != 1, CM != 1>(x + X_BYTES, &map_y, col0, CM > 1 ? cm * (BN / CM) : 0, k, bar, mask_y);
          if (++s == STAGES) s = 0, parity ^= 1;
        }
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

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NWG == 3 ? 160 : 232));
  const int wg = warp >> 2;
  Sum acc[MW][WORDS];
  const u32 low_x = desc_low(ring, X_MN ? 8192 : 16) + (PINGPONG ? 0 : operand_at<X_MN, 1, BM>(1, 0, 0) * (wg * MW));
  const u32 low_y = desc_low(ring + X_BYTES, Y_MN ? 8192 : 16);
  const u32 mine = staging + (SWAP || WGSTORE ? wg * (OUT * OUT_BYTES) : warp * (OUT * CHUNK_BYTES));
  auto release = [&](int s) { release_stage(empty, s, tid, cm, cn, 0); };
  int s = 0;
  u32 parity = 0;
  auto advance = [&](int by) {  // skip the other warpgroup's stages
    const int p = s + by;
    s = p % STAGES;
    parity ^= (p / STAGES) & 1;
  };
  if (PINGPONG && wg) advance(steps);
  int chunk = 0;
  const int first = mine_first + (PINGPONG ? wg * stride : 0), hop = PINGPONG ? NWG * stride : stride;
#pragma unroll 1  // here and below: a short kernel feels every instruction-cache miss
  for (int t = first; t < tiles; t += hop) {
    // A warpgroup may only wait for a stage's next phase, parity tells no more: it starts when the other has seen all its stages.
    if (PINGPONG && (wg || t != first)) named_sync(2 + wg, NC);
    int before = 0;
#pragma unroll 1
    for (int k = 0; k < steps; k++) {
      bar_wait(full + s * 8, parity);
      const u32 x = low_x + s * (STAGE_BYTES >> 4), y = low_y + s * (STAGE_BYTES >> 4);
      wgmma_fence();
#pragma unroll
      for (int k16 = 0; k16 < 4; k16++)
#pragma unroll
        for (int m = 0; m < MW; m++)
          wgmma(acc[m], desc(x + operand_at<X_MN, 1, BM>(m, 0, k16)), desc(y + operand_at<Y_MN, 1, BN>(0, 0, k16)), (k | k16) != 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (k > 0) release(before);
      before = s;
      if (++s == STAGES) s = 0, parity ^= 1;
    }
    if (PINGPONG) named_arrive(3 - wg, NC);
#if PDL == 2
    if (dependent && t + hop >= tiles) pdl_trigger();
#endif
    wgmma_wait<0>();
    release(before);
#pragma unroll
    for (int m = 0; m < MW; m++)
#pragma unroll
      for (int i = 0; i < WORDS; i++) pin(acc[m][i]);

    int row0, col0;
    place(t, row0, col0);
    row0 += PINGPONG ? 0 : wg * (MW * 64);
#include "sm90_persistent_store.cuh"
    if (PINGPONG) advance((NWG - 1) * steps);
  }
  if (lane == 0) tma_store_wait_read<0>();
  __syncwarp();
  if (MULTI) {
    cluster_arrive();
    cluster_wait();
  }
}
