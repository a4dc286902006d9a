// C = A B, fp16 in and out, fp32 accumulation; one output tile, or one K part of it, a block; one launch.
// For outputs of about one wave of tiles, K parts included.
//
// X is the operand on the 64-row wgmma axis (BM rows a block), Y the one on the N axis (BN rows).
// SWAP = 0: X = A [M, K], Y = B^T [N, K].   SWAP = 1: X = B^T, Y = A, and the tile is written transposed,
// which gives tiles of 96 or 48 rows of C (12288 = 128 x 96 fills the chip).
// TB = 1: Y is row-major B [K, N], read by MN-major descriptors (SWAP = 0 only).
//
// Blocks of a cluster, rank = (ck * CN + cn) * CM + cm: CM x CN of them sit side by side in C and, with MC = 1,
// share operand loads by multicast; with MC = 0 they are only placed side by side. CK of them split K and reduce
// through distributed shared memory. SL = gridDim.y further parts of K are reduced through L2: all blocks must be
// resident at once (1 block an SM; clusters of 4 and more reach 120 SMs only).
//
// Workspace, SL > 1. L2X = 0: `ws` persistent, filled with EMPTY, found and left so. L2X = 1: `ws` scratch, `counters`
// persistent zeros, found and left so. Floats: tiles * CK * SL * (SL - 1) * BM * BN / (CK * SL).
// Grid: x = clusters of tiles * CM * CN * CK, y = SL. Shared memory: STAGES * (BM + BN) * KB * 128 + 1024, plus
// BM * BN * 4 * (CK - 1) / CK for the cluster's inbox; the epilogue reuses the ring.
// pdl: -1 plain, 0 trigger dependents at the top, 1 after the main loop.
#include "ptx.cuh"
#include "wgmma.cuh"
#include "epilogue.cuh"
#include "order.cuh"

#ifndef BM
#define BM 64
#endif
#ifndef BN
#define BN 64
#endif
#ifndef KB         // K elements a ring stage / 64
#define KB 2
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef NWG        // consumer warpgroups, along BM
#define NWG 1
#endif
#ifndef CM
#define CM 1
#endif
#ifndef CN
#define CN 1
#endif
#ifndef CK
#define CK 1
#endif
#ifndef SL
#define SL 1
#endif
#ifndef MC         // 0: place the CM x CN blocks side by side, no multicast (no gain found over an order by GPC)
#define MC 1
#endif
#ifndef LOCAL      // first LOCAL stages are loaded without multicast, so that no load waits for the cluster
#define LOCAL 0
#endif
#ifndef TB         // 1: row-major B
#define TB 0
#endif
#ifndef SWAP       // 1: operands swapped
#define SWAP 0
#endif
#ifndef MINB       // blocks an SM
#define MINB 1
#endif
#ifndef HINT       // L2 policy of the loads: 1 X evicted first, 2 Y evicted first, 3 both (no gain found)
#define HINT 0
#endif
#ifndef PREFILL    // 1: loads that need no other block are issued before the block's first barrier
#define PREFILL 1
#endif
#ifndef ORDER      // entries of the tile table
#define ORDER 264
#endif
#ifndef L2X        // L2 reduction: 0 every word polled against a fill pattern, 1 counters with release/acquire
#define L2X 0
#endif

constexpr int MW = BM / 64 / NWG;        // 64-row slabs a warpgroup
constexpr int NA = BN / 2;               // accumulators a thread and slab
constexpr int R = MW * NA;               // accumulators a thread
constexpr int NC = NWG * 128;            // consumer threads
constexpr int CS = CM * CN * CK;         // cluster size
constexpr bool MULTI = MC && CM * CN > 1;
// setmaxnreg needs the producer to be a whole warpgroup; small accumulators do without.
constexpr bool SPLIT_REGS = R >= 128 && NWG > 1;
constexpr int THREADS = NC + (SPLIT_REGS ? 128 : 32);
constexpr uint32_t X_BYTES = KB * BM * 128, Y_BYTES = KB * BN * 128, STAGE_BYTES = X_BYTES + Y_BYTES;
constexpr int RK = R / CK;               // accumulators a thread owns after the cluster reduction
constexpr int RL = RK / SL;              // ... and after the L2 reduction
constexpr int VK = RK >= 4 ? 4 : 2, VL = RL >= 4 ? 4 : 2;
constexpr uint32_t RED_BYTES = CK > 1 ? (uint32_t)(CK - 1) * RK * NC * 4 : 0;
static_assert(BM % (64 * NWG) == 0 && BN % 8 == 0, "tile");
static_assert(R % CK == 0 && RK % SL == 0 && RL % 2 == 0 && RL % VL == 0 && RK % VK == 0, "split");
static_assert(!TB || (BN % 64 == 0 && (!MULTI || BN / CM % 64 == 0)), "row-major B");
static_assert(!SWAP || (CK == 1 && SL == 1 && !TB && BN % 16 == 0), "swapped operands");
static_assert(RL <= NA || RL % NA == 0, "a block's share of the sums is part of a slab, or whole slabs");

// fill pattern of the polled workspace: a NaN that no sum of products produces
constexpr uint32_t EMPTY = 0xffffffffu;

extern "C" __global__ void __launch_bounds__(THREADS, MINB)
gemm(const __grid_constant__ CUtensorMap map_x, const __grid_constant__ CUtensorMap map_y,
     const __grid_constant__ CUtensorMap map_c, half* __restrict__ C, float* __restrict__ ws,
     unsigned* __restrict__ counters, int M, int N, int K, int /*order comes from the table*/, int pdl, const __grid_constant__ Order<ORDER> order) {
  extern __shared__ char smem_raw[];
  __shared__ __align__(8) uint64_t bars[2 * STAGES + 1];
  const uint32_t full = smem_addr(bars), empty = full + STAGES * 8, redbar = full + STAGES * 16;
  const uint32_t ring = (smem_addr(smem_raw) + 1023) & ~1023u;
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), lane = tid & 31;
  if (pdl == 0) pdl_trigger();

  // ---- which tile, which part of K
  const int rank = CS > 1 ? blockIdx.x % CS : 0, group = blockIdx.x / CS;
  const int cm = rank % CM, cn = (rank / CM) % CN, ck = rank / (CM * CN), sl = SL > 1 ? blockIdx.y : 0;
  const int tile = order.at[group], row0 = ((tile & 255) * CM + cm) * BM, col0 = ((tile >> 8) * CN + cn) * BN;
  const int part = sl * CK + ck, steps = K / (64 * KB), share = steps / (CK * SL), extra = steps % (CK * SL);
  const int k0 = part * share + min(part, extra), n = share + (part < extra ? 1 : 0);

  // ---- producer: one thread
  const uint16_t mask_x = (uint16_t)((((1u << (CM * CN)) - 1) / ((1u << CM) - 1)) << (cm + ck * CM * CN));
  const uint16_t mask_y = (uint16_t)(((1u << CM) - 1) << (cn * CM + ck * CM * CN));
  auto load = [&](int k, int s, bool shared) {
    const uint32_t bar = full + s * 8, x = ring + s * STAGE_BYTES, y = x + X_BYTES;
    bar_expect(bar, STAGE_BYTES);
    const int kk = k * KB;
    constexpr int HX = HINT & 1, HY = (HINT >> 1) & 1, XS = BM / CN, YS = BN / CM;
    if (!MULTI) tma_load<HX>(x, &map_x, 0, row0, kk, bar);
    else
#pragma unroll
      for (int u = 0; u < KB; u++)  // a slice of the rows is dense only within 64 elements of K
        if (shared && CN > 1) tma_load_multicast<HX>(x + u * BM * 128 + cn * XS * 128, &map_x, 0, row0 + cn * XS, kk + u, bar, mask_x);
        else
#pragma unroll
          for (int c = 0; c < CN; c++) tma_load<HX>(x + u * BM * 128 + c * XS * 128, &map_x, 0, row0 + c * XS, kk + u, bar);
    if constexpr (TB != 0) {
      if (MULTI && shared && CM > 1) tma_load_multicast<HY>(y + cm * (YS / 64) * KB * 8192, &map_y, 0, kk * 64, (col0 + cm * YS) / 64, bar, mask_y);
      else
#pragma unroll
        for (int c = 0; c < (MULTI ? CM : 1); c++) tma_load<HY>(y + c * (YS / 64) * KB * 8192, &map_y, 0, kk * 64, (col0 + c * YS) / 64, bar);
    } else if (!MULTI) tma_load<HY>(y, &map_y, 0, col0, kk, bar);
    else
#pragma unroll
      for (int u = 0; u < KB; u++)
        if (shared && CM > 1) tma_load_multicast<HY>(y + u * BN * 128 + cm * YS * 128, &map_y, 0, col0 + cm * YS, kk + u, bar, mask_y);
        else
#pragma unroll
          for (int c = 0; c < CM; c++) tma_load<HY>(y + u * BN * 128 + c * YS * 128, &map_y, 0, col0 + c * YS, kk + u, bar);
  };
  // Whatever needs no other block is in flight before the block's first barrier.
  const int early = PREFILL ? min(n, MULTI ? LOCAL : STAGES) : 0;
  if (warp == NC / 32 && elect_one()) {
#pragma unroll
    for (int s = 0; s < STAGES; s++) { bar_init(full + s * 8, 1); bar_init(empty + s * 8, NWG * (MULTI ? CM + CN - 1 : 1)); }
    if (CK > 1) bar_init(redbar, 1);
    bar_init_fence();
    if (CK > 1) bar_expect(redbar, RED_BYTES);
    pdl_wait();
#pragma unroll 1
    for (int i = 0; i < early; i++) load(k0 + i, i, false);
  }
  __syncthreads();
  if (CS > 1 && (MULTI || CK > 1)) cluster_arrive();

  if (warp >= NC / 32) {
    if (SPLIT_REGS) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (MULTI) cluster_wait();
    if (warp == NC / 32 && elect_one()) {
      int i = early;
      if (MULTI || !PREFILL)
#pragma unroll 1
        for (; i < n && i < STAGES; i++) load(k0 + i, i, true);
      int s = 0; uint32_t parity = 0;
#pragma unroll 1
      for (; i < n; i++) {
        bar_wait(empty + s * 8, parity);
        load(k0 + i, s, true);
        if (++s == STAGES) { s = 0; parity ^= 1; }
      }
    }
    __syncwarp();
    if (!MULTI && CK > 1) cluster_wait();
    // No block leaves while another may still signal its barriers.
    if (MULTI) { cluster_arrive(); cluster_wait(); }
    return;
  }

  // ---- consumers
  if (SPLIT_REGS) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  if (MULTI) cluster_wait();
  const int wg = warp >> 2, g = lane >> 2, t4 = lane & 3;
  float acc[MW][NA];
  // in a cluster the high bits of an address carry the rank; desc_low drops them
  const uint32_t low_x = desc_low(ring + wg * (MW * 8192), 16), low_y = desc_low(ring + X_BYTES, TB ? KB * 8192 : 16);
  const bool reuse = n > STAGES;
  auto release = [&](int s) {
    if (MULTI) {
      // to every block that writes this stage of ours: ours and those in our row and column of the cluster
      const int i = tid & 127;
      if (i < CM + CN - 1) {
        const int c = i < CM ? cn * CM + i : ((i - CM) + (i - CM >= cn ? 1 : 0)) * CM + cm;
        bar_arrive_remote(empty + s * 8, c + ck * CM * CN);
      }
    } else if ((tid & 127) == 0) bar_arrive(empty + s * 8);
  };
  const int wrow = row0 + wg * MW * 64 + (warp & 3) * 16;  // first row (column, if swapped) of this warp in slab 0
  constexpr uint32_t WARP_STAGE = SWAP ? BN * 48 : 16 * (BN * 2 + 16);
  constexpr bool PLAIN = CK == 1 && SL == 1;
  int s = 0, before = 0; uint32_t parity = 0;
#pragma unroll 1  // here and above: a short kernel feels every instruction-cache miss
  for (int i = 0; i < n; i++) {
    bar_wait(full + s * 8, parity);
    const uint32_t x = low_x + s * (STAGE_BYTES >> 4), y = low_y + s * (STAGE_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int u = 0; u < KB; u++)
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int m = 0; m < MW; m++)
          Wgmma<BN, TB>::mma(acc[m], desc(x + (u * BM * 128 + m * 8192 + k * 32) / 16),
                             desc(y + (TB ? (u * 4 + k) * 2048 : u * BN * 128 + k * 32) / 16), (i | u | k) != 0);
    wgmma_commit();
    if (reuse) { wgmma_wait<1>(); if (i > 0) release(before); before = s; }  // one step late: the tensor cores never drain
    if (++s == STAGES) { s = 0; parity ^= 1; }
  }
  if (pdl == 1) pdl_trigger();
  wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < MW; m++)
#pragma unroll
    for (int i = 0; i < NA; i++) asm volatile("" : "+f"(acc[m][i]) :: "memory");
  if (MULTI) cluster_arrive();  // nobody signals us after this; the wait is at the very end
  named_sync(1, NC);            // the ring becomes staging space: every wgmma of the block has read it

  const uint32_t stage = ring + warp * WARP_STAGE;
  if constexpr (PLAIN) {
#pragma unroll
    for (int m = 0; m < MW; m++)
      if constexpr (SWAP) store_columns<BN>(C, N, acc[m], col0, wrow + m * 64, stage, lane);
      else store_rows<BN>(C, N, acc[m], wrow + m * 64, col0, stage, lane);
  } else {
    // ---- reduction over the cluster: rank ck keeps accumulators [ck * RK, (ck + 1) * RK) of every thread
    float own[RK];
    if constexpr (CK > 1) {
      const uint32_t inbox = ring + STAGES * STAGE_BYTES;  // [CK - 1 senders][RK / VK][NC][VK] floats
      if (!MULTI) cluster_wait();                          // every peer has armed its barrier
#pragma unroll
      for (int o = 0; o < CK; o++) {
        if (o == ck) {
#pragma unroll
          for (int i = 0; i < RK; i++) own[i] = acc[(o * RK + i) / NA][(o * RK + i) % NA];
        } else {
          const int slot = ck - (ck > o ? 1 : 0);  // our place among o's senders
          const uint32_t dst = map_rank(inbox + (slot * RK * NC + tid * VK) * 4, (o * CN + cn) * CM + cm);
          const uint32_t bar = map_rank(redbar, (o * CN + cn) * CM + cm);
#pragma unroll
          for (int i = 0; i < RK; i += VK) {
            const float* f = &acc[(o * RK + i) / NA][(o * RK + i) % NA];
            const uint32_t d = dst + i * NC * 4;
            if constexpr (VK == 4) asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" :: "r"(d), "f"(f[0]), "f"(f[1]), "f"(f[2]), "f"(f[3]), "r"(bar) : "memory");
            else asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" :: "r"(d), "f"(f[0]), "f"(f[1]), "r"(bar) : "memory");
          }
        }
      }
      bar_wait(redbar, 0);
#pragma unroll
      for (int j = 0; j < CK - 1; j++) {
        const uint32_t src = inbox + (j * RK * NC + tid * VK) * 4;
#pragma unroll
        for (int i = 0; i < RK; i += VK) {
          float v[4];
          if constexpr (VK == 4) asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(src + i * NC * 4) : "memory");
          else asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(src + i * NC * 4) : "memory");
#pragma unroll
          for (int e = 0; e < VK; e++) own[i + e] += v[e];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < RK; i++) own[i] = acc[i / NA][i % NA];
    }
    // ---- reduction over the L2 parts: part sl keeps [sl * RL, (sl + 1) * RL) of own; all blocks are resident
    float out[RL];
    if constexpr (SL > 1) {
      const int unit = ((group * CN + cn) * CM + cm) * CK + ck;
      float* box = ws + (size_t)unit * SL * (SL - 1) * RL * NC;  // [owner][SL - 1 senders][RL / VL][NC][VL]
#pragma unroll
      for (int o = 0; o < SL; o++) {
        if (o == sl) {
#pragma unroll
          for (int i = 0; i < RL; i++) out[i] = own[o * RL + i];
        } else {
          float* w = box + (size_t)(o * (SL - 1) + sl - (sl > o ? 1 : 0)) * RL * NC + tid * VL;
#pragma unroll
          for (int i = 0; i < RL; i += VL) {
            const float* f = &own[o * RL + i];
            if constexpr (VL == 4) st_relaxed4(w + i * NC, f[0], f[1], f[2], f[3]); else st_relaxed2(w + i * NC, f[0], f[1]);
          }
        }
      }
      float* in = box + (size_t)sl * (SL - 1) * RL * NC + tid * VL;
      unsigned* cnt = counters + unit * SL;
      if constexpr (L2X == 1) {
        named_sync(1, NC);
        if (tid < SL && tid != sl) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(cnt + tid) : "memory");
        if (tid == 0) {
          unsigned v; int spins = 0;
          do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(cnt + sl) : "memory"); } while (v != SL - 1 && ++spins < (1 << 18));
          cnt[sl] = 0;  // all senders have counted: the workspace is as it was found
        }
        named_sync(1, NC);
      }
      constexpr int GROUP = SL * RL <= 64 && SL > 1 ? SL - 1 : (64 / RL > 0 ? 64 / RL : 1);  // senders read at once, by registers
#pragma unroll
      for (int j0 = 0; j0 < SL - 1; j0 += GROUP) {
        uint32_t x[GROUP][RL];
        bool ready; int spins = 0;
        do {
          ready = true;
#pragma unroll
          for (int j = 0; j < GROUP; j++)
            if (j0 + j < SL - 1) {
#pragma unroll
              for (int i = 0; i < RL; i += VL) {
                const float* w = in + (size_t)(j0 + j) * RL * NC + i * NC;
                if constexpr (VL == 4) ld_relaxed4(w, &x[j][i]); else ld_relaxed2(w, &x[j][i]);
              }
            }
          if constexpr (L2X == 0) {
#pragma unroll
            for (int j = 0; j < GROUP; j++)
              if (j0 + j < SL - 1)
#pragma unroll
                for (int i = 0; i < RL; i++) ready &= x[j][i] != EMPTY;
          }
        } while (!ready && ++spins < (1 << 18));
#pragma unroll
        for (int j = 0; j < GROUP; j++)
          if (j0 + j < SL - 1)
#pragma unroll
            for (int i = 0; i < RL; i += VL) {
#pragma unroll
              for (int e = 0; e < VL; e++) out[i + e] += __uint_as_float(x[j][i + e]);
              if constexpr (L2X == 0) {
                const float z = __uint_as_float(EMPTY);
                float* w = in + (size_t)(j0 + j) * RL * NC + i * NC;
                if constexpr (VL == 4) st_relaxed4(w, z, z, z, z); else st_relaxed2(w, z, z);
              }
            }
      }
    } else {
#pragma unroll
      for (int i = 0; i < RL; i++) out[i] = own[i];
    }
    const int a = ck * RK + sl * RL;  // our first accumulator
    if constexpr (RL >= NA) {
#pragma unroll
      for (int m = 0; m < RL / NA; m++) store_rows<BN>(C, N, out + m * NA, wrow + (a / NA + m) * 64, col0, stage, lane);
    } else if constexpr (RL >= 4) {
      store_rows<RL * 2>(C, N, out, wrow + a / NA * 64, col0 + a % NA * 2, stage, lane);
    } else {
      const int y = a % NA;
      *(uint32_t*)(C + (size_t)(wrow + a / NA * 64 + g + ((y & 2) ? 8 : 0)) * N + col0 + (y >> 2) * 8 + 2 * t4) = pack2(out[0], out[1]);
    }
  }
  if (MULTI) cluster_wait();
}
