// C = A B for several tiles a block: fp16 in and out, fp32 accumulation, persistent, epilogue overlapped.
//
// One producer warpgroup and NWG consumer warpgroups. PINGPONG = 0: they share one BM x BN tile (64-row slabs each);
// PINGPONG = 1: two warpgroups with a tile each, so that one stores while the other multiplies.
// CM x CN blocks of a cluster sit side by side in C and share operand loads by multicast.
// Tile sizes need not divide C: TMA fills loads with zeros and clips stores at the edges.
// Epilogue: stmatrix to shared memory, then asynchronous TMA stores. Per warp (no barrier at all) or, with WGSTORE = 1,
// per warpgroup in 64-row boxes, which is what shapes bound by the store of C want.
// Grid: min(tiles, resident) in whole clusters. Shared memory: STAGES * (BM + BN) * 128 + NWG * OUT * OUT_BYTES + 1024.
// map_c boxes: CW x 16; WGSTORE: 64 x 64; SWAP: 64 x BN.
#include "ptx.cuh"
#include "wgmma.cuh"
#include "order.cuh"

#ifndef BM
#define BM 128
#endif
#ifndef BN
#define BN 256
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef NWG
#define NWG 2
#endif
#ifndef PINGPONG
#define PINGPONG 0
#endif
#ifndef CM
#define CM 2
#endif
#ifndef CN
#define CN 1
#endif
#ifndef TB
#define TB 0
#endif
#ifndef SWAP       // 1: X = B^T, Y = A, tiles written transposed: BM counts columns of C, BN rows (96 or 192 suit M = 12288)
#define SWAP 0
#endif
#ifndef HINT       // 1: C is evicted from L2 first
#define HINT 0
#endif
#ifndef WGSTORE    // 1: a warpgroup stages and stores whole 64-row slabs (large boxes); 0: each warp its own 16 rows (no barriers)
#define WGSTORE 0
#endif
#ifndef OUT        // staging buffers a warp, each 16 rows x CW columns
#define OUT 2
#endif


constexpr int MW = BM / 64 / (PINGPONG ? 1 : NWG);
constexpr int NA = BN / 2;
constexpr int NC = NWG * 128;
constexpr int CS = CM * CN;
constexpr uint32_t X_BYTES = BM * 128, Y_BYTES = BN * 128, STAGE_BYTES = X_BYTES + Y_BYTES;
constexpr int READERS = PINGPONG ? 1 : NWG;  // warpgroups that read one stage
// Widths such as 144, 160 and 176 make the last wave fuller; C's edge is clipped by TMA. A chunk must divide the tile.
constexpr int CW = BN % 64 == 0 ? 64 : BN % 80 == 0 ? 80 : BN;  // 64: 128-byte swizzle; else plain rows, at most 2-way bank conflicts
constexpr uint32_t CHUNK_BYTES = 16 * CW * 2;
constexpr uint32_t OUT_BYTES = SWAP || WGSTORE ? BN * 128 : 4 * CHUNK_BYTES;  // a warpgroup's staging buffer
static_assert(BN % 8 == 0 && BM % 64 == 0 && (!TB || BN % 64 == 0) && !(SWAP && (TB || BN % 16)), "tile");

// Groups of `width` rows of cluster tiles are walked column by column, so that the tiles in flight share operands in L2.
DEV void tile_at(int t, int gm, int gn, int width, int& m, int& n) {
  const int per = width * gn, band = t / per, first = band * width, w = min(width, gm - first), i = t - band * per;
  m = first + i % w; n = i / w;
}

extern "C" __global__ void __launch_bounds__(NC + 128, 1)
gemm(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_y,
     const __grid_constant__ CUtensorMap map_c, half* __restrict__ C, float* __restrict__ ws,
     unsigned* __restrict__ counters, int M, int N, int K, int group_width, int pdl,
     const __grid_constant__ Order<528> order) {
  extern __shared__ char smem_raw[];
  __shared__ __align__(8) uint64_t bars[2 * STAGES];
  const uint32_t full = smem_addr(bars), empty = full + STAGES * 8;
  const uint32_t ring = (smem_addr(smem_raw) + 1023) & ~1023u, staging = ring + STAGES * STAGE_BYTES;
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), lane = tid & 31;
  const int rank = blockIdx.x % CS, cm = rank % CM, cn = rank / CM;
  // group_width > 0: bands of rows; < 0: bands of columns; 0: few tiles, their order comes from the table
  const int rows = SWAP ? N : M, cols = SWAP ? M : N;
  const int gm = (rows + BM * CM - 1) / (BM * CM), gn = (cols + BN * CN - 1) / (BN * CN), tiles = gm * gn, stride = gridDim.x / CS, steps = K / 64;
  const int mine_first = group_width == 0 ? blockIdx.x / CS : order.at[blockIdx.x / CS];
  auto place = [&](int t, int& row0, int& col0) {
    int m, n;
    if (group_width == 0) { m = order.at[t] & 255; n = order.at[t] >> 8; }
    else if (group_width > 0) tile_at(t, gm, gn, group_width, m, n); else tile_at(t, gn, gm, -group_width, n, m);
    row0 = (m * CM + cm) * BM; col0 = (n * CN + cn) * BN;
  };
  if (pdl == 0) pdl_trigger();
  constexpr int XS = BM / CN, YS = BN / CM;
  const uint16_t mask_x = (uint16_t)((((1u << CS) - 1) / ((1u << CM) - 1)) << cm), mask_y = (uint16_t)(((1u << CM) - 1) << (cn * CM));
  auto load = [&](int row0, int col0, int k, int s) {
    const uint32_t bar = full + s * 8, x = ring + s * STAGE_BYTES, y = x + X_BYTES;
    bar_expect(bar, STAGE_BYTES);
    if (CN > 1) tma_load_multicast(x + cn * XS * 128, &map_x, 0, row0 + cn * XS, k, bar, mask_x);
    else tma_load(x, &map_x, 0, row0, k, bar);
    if (CM > 1) {
      if (TB) tma_load_multicast(y + cm * YS * 128, &map_y, 0, k * 64, (col0 + cm * YS) / 64, bar, mask_y);
      else tma_load_multicast(y + cm * YS * 128, &map_y, 0, col0 + cm * YS, k, bar, mask_y);
    } else if (TB) tma_load(y, &map_y, 0, k * 64, col0 / 64, bar);
    else tma_load(y, &map_y, 0, col0, k, bar);
  };
  if (warp == NC / 32 && elect_one()) {
#pragma unroll
    for (int s = 0; s < STAGES; s++) { bar_init(full + s * 8, 1); bar_init(empty + s * 8, READERS * (CM + CN - 1)); }
    bar_init_fence();
  }
  __syncthreads();
  if (CS > 1) { cluster_arrive(); cluster_wait(); }

  if (warp >= NC / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(NWG == 3 ? 32 : 40));
    if (warp == NC / 32 && elect_one()) {
      pdl_wait();
      int s = 0; uint32_t parity = 1;  // a fresh barrier passes a wait for parity 1
#pragma unroll 1
      for (int t = mine_first; t < tiles; t += stride) {
        int row0, col0; place(t, row0, col0);
#pragma unroll 1
        for (int k = 0; k < steps; k++) {
          bar_wait(empty + s * 8, parity);
          load(row0, col0, k, s);
          if (++s == STAGES) { s = 0; parity ^= 1; }
        }
      }
    }
    __syncwarp();
    if (CS > 1) { cluster_arrive(); cluster_wait(); }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(NWG == 3 ? 160 : 232));
  const int wg = warp >> 2;
  float acc[MW][NA];
  const uint32_t low_x = desc_low(ring + (PINGPONG ? 0 : wg * (MW * 8192)), 16), low_y = desc_low(ring + X_BYTES, TB ? 8192 : 16);
  const uint32_t mine = staging + (SWAP || WGSTORE ? wg * (OUT * OUT_BYTES) : warp * (OUT * CHUNK_BYTES));
  auto release = [&](int s) {
    if (CS > 1) {
      const int i = tid & 127;
      if (i < CM + CN - 1) {
        const int c = i < CM ? cn * CM + i : ((i - CM) + (i - CM >= cn ? 1 : 0)) * CM + cm;
        bar_arrive_remote(empty + s * 8, c);
      }
    } else if ((tid & 127) == 0) bar_arrive(empty + s * 8);
  };
  int s = 0; uint32_t parity = 0;
  auto advance = [&](int by) {  // skip the other warpgroup's stages
    const int p = s + by; s = p % STAGES; parity ^= (p / STAGES) & 1;
  };
  if (PINGPONG && wg) advance(wg * steps);
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
      const uint32_t x = low_x + s * (STAGE_BYTES >> 4), y = low_y + s * (STAGE_BYTES >> 4);
      wgmma_fence();
#pragma unroll
      for (int q = 0; q < 4; q++)
#pragma unroll
        for (int m = 0; m < MW; m++)
          Wgmma<BN, TB>::mma(acc[m], desc(x + (m * 8192 + q * 32) / 16), desc(y + q * (TB ? 2048 : 32) / 16), (k | q) != 0);
      wgmma_commit();
      wgmma_wait<1>();
      if (k > 0) release(before);
      before = s;
      if (++s == STAGES) { s = 0; parity ^= 1; }
    }
    if (PINGPONG) asm volatile("bar.arrive %0, %1;" :: "r"(3 - wg), "n"(NC) : "memory");
    if (pdl == 1 && t + hop >= tiles) pdl_trigger();
    wgmma_wait<0>();
    release(before);
#pragma unroll
    for (int m = 0; m < MW; m++)
#pragma unroll
      for (int i = 0; i < NA; i++) asm volatile("" : "+f"(acc[m][i]) :: "memory");

    int row0, col0; place(t, row0, col0);
    const int wrow = row0 + (PINGPONG ? 0 : wg * MW * 64) + (warp & 3) * 16;
    if constexpr (SWAP) {
      // 64 columns x BN rows of C a slab; the four warps share its buffer, 16 columns each
      const bool leader = (tid & 127) == 0;
#pragma unroll
      for (int m = 0; m < MW; m++) {
        if (leader) tma_store_wait_read<OUT - 1>();
        named_sync(4 + wg, 128);
        const uint32_t buf = mine + (chunk % OUT) * OUT_BYTES;
        chunk++;
#pragma unroll
        for (int j = 0; j < BN / 8; j += 2) {
          const float* a = &acc[m][4 * j];
          const int r = lane & 7, i = lane >> 3;
          asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                       :: "r"(buf + ((j + (i >> 1)) * 8 + r) * 128 + ((((warp & 3) * 2 + (i & 1)) ^ r) << 4)), "r"(pack2(a[0], a[1])), "r"(pack2(a[2], a[3])),
                          "r"(pack2(a[4], a[5])), "r"(pack2(a[6], a[7])) : "memory");
        }
        proxy_fence(); named_sync(4 + wg, 128);
        if (leader) { tma_store<HINT>(&map_c, buf, row0 + (PINGPONG ? 0 : wg * MW * 64) + m * 64, col0); tma_store_commit(); }
      }
    } else if constexpr (WGSTORE) {
      static_assert(!WGSTORE || BN % 64 == 0, "");
      const bool leader = (tid & 127) == 0;
#pragma unroll
      for (int m = 0; m < MW; m++) {
        if (leader) tma_store_wait_read<OUT - 1>();
        named_sync(4 + wg, 128);
        const uint32_t buf = mine + (chunk % OUT) * OUT_BYTES;
        chunk++;
#pragma unroll
        for (int j = 0; j < BN / 8; j += 2) {
          const float* a = &acc[m][4 * j];
          const int r = (warp & 3) * 16 + (lane & 15), c = j + (lane >> 4);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                       :: "r"(buf + (c >> 3) * 8192 + r * 128 + (((c & 7) ^ (r & 7)) << 4)), "r"(pack2(a[0], a[1])), "r"(pack2(a[2], a[3])),
                          "r"(pack2(a[4], a[5])), "r"(pack2(a[6], a[7])) : "memory");
        }
        proxy_fence(); named_sync(4 + wg, 128);
        if (leader) {
#pragma unroll
          for (int c = 0; c < BN / 64; c++) tma_store<HINT>(&map_c, buf + c * 8192, col0 + c * 64, row0 + (PINGPONG ? 0 : wg * MW * 64) + m * 64);
          tma_store_commit();
        }
      }
    } else
#pragma unroll
    for (int m = 0; m < MW; m++)
#pragma unroll
      for (int c = 0; c < BN / CW; c++) {
        if (lane == 0) tma_store_wait_read<OUT - 1>();  // the store that used this buffer has read it
        __syncwarp();
        const uint32_t buf = mine + (chunk % OUT) * CHUNK_BYTES;
        chunk++;
#pragma unroll
        for (int j = 0; j < CW / 8; j += 2) {
          const float* a = &acc[m][c * (CW / 2) + 4 * j];
          const int r = lane & 15, cc = j + (lane >> 4);
          const int flip = CW == 64 ? r & 7 : 0;  // the swizzle of C's tensor map
          const uint32_t at = buf + r * (CW * 2) + ((cc ^ flip) << 4);
          if (j + 1 < CW / 8)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                         :: "r"(at), "r"(pack2(a[0], a[1])), "r"(pack2(a[2], a[3])), "r"(pack2(a[4], a[5])), "r"(pack2(a[6], a[7])) : "memory");
          else
            asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" :: "r"(buf + r * (CW * 2) + j * 16), "r"(pack2(a[0], a[1])), "r"(pack2(a[2], a[3])) : "memory");
        }
        proxy_fence(); __syncwarp();
        if (lane == 0) { tma_store<HINT>(&map_c, buf, col0 + c * CW, wrow + m * 64); tma_store_commit(); }
      }
    if (PINGPONG) advance((NWG - 1) * steps);
  }
  if (lane == 0) tma_store_wait_read<0>();
  __syncwarp();
  if (CS > 1) { cluster_arrive(); cluster_wait(); }
}
