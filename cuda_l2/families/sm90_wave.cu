// C = A B, fp16 in and out: one output tile, or one K part of it, a block; one launch, for outputs of about one wave of
// tiles, K parts included.
//
// X is the operand on the 64-row wgmma axis (BM rows a block), Y the one on the N axis (BN rows).
// SWAP = 0: X = A, Y = B^T. SWAP = 1: X = B^T, Y = A, and the tile is written transposed, which gives tiles of 96 or 48
// rows of C. Row-major B is read as it lies, by MN-major descriptors.
//
// A warp of its own (a warpgroup, where registers are split) keeps a ring of STAGES tiles of 64 KB elements of K filled
// by TMA; NWG warpgroups multiply. Blocks of a cluster, rank = (ck * CN + cn) * CM + cm: CM x CN of them sit side by side
// in C and share operand loads by multicast; CK of them split K and reduce through distributed shared memory.
// SL = gridDim.y further parts of K are reduced through L2: all blocks must be resident at once. Every sum of parts is
// taken in fp32 in one fixed order.
//
// Macros: the compiled choices of sm90_wave.py, LAYOUT_TN, NWG, and what the sizes of the task are multiples of: X_FLAT, Y_FLAT
// (inner sizes of the operands are no multiples of 64), EDGES (0: whole tiles; 1: C is cut off at multiples of 8 columns;
// 2: anywhere).
#include "sm90_operands.cuh"

#if ACC == 16
using Sum = u32;  // a pair of fp16
#else
using Sum = float;
#endif
constexpr bool X_MN = SWAP && !LAYOUT_TN, Y_MN = !SWAP && !LAYOUT_TN;
constexpr int MW = BM / 64 / NWG;             // 64-row slabs a warpgroup
constexpr int NA = BN / 2;                    // sums a thread and slab
constexpr int R = MW * NA;                    // sums a thread
constexpr int WORDS = ACC == 16 ? NA / 2 : NA;  // registers a slab
constexpr int NC = NWG * 128;                 // consumer threads
constexpr int CS = CM * CN * CK;              // cluster size
constexpr bool MULTI = CM * CN > 1;
// setmaxnreg needs the producer to be a whole warpgroup; few sums do without.
constexpr bool SPLIT_REGS = MW * WORDS >= 128 && NWG > 1;
constexpr int THREADS = NC + (SPLIT_REGS ? 128 : 32);
constexpr u32 X_BYTES = KB * BM * 128, STAGE_BYTES = X_BYTES + KB * BN * 128;
constexpr int RK = R / CK;                    // sums a thread owns after the cluster reduction
constexpr int RL = RK / SL;                   // ... and after the L2 reduction
constexpr int VK = RK >= 4 ? 4 : 2, VL = RL >= 4 ? 4 : 2;
constexpr u32 INBOX_BYTES = (CK - 1) * RK * NC * 4;
constexpr bool PLAIN = CK == 1 && SL == 1;
static_assert(BM % (64 * NWG) == 0 && BN % 8 == 0 && (!SWAP || (PLAIN && BN % 16 == 0)), "tile");
static_assert(R % CK == 0 && RK % SL == 0 && RL % VL == 0 && RK % VK == 0, "split");
static_assert(RL <= NA ? NA % RL == 0 : RL % NA == 0, "a block's share of the sums is part of a slab, or whole slabs");
static_assert(BM / CN % (X_MN ? 64 : 8) == 0 && BN / CM % (Y_MN ? 64 : 8) == 0, "slices of a multicast");

// Tile row | tile column << 8 of cluster i, worked out by the contract: a lookup instead of integer divisions before the
// first load (0.1 to 0.2 us), in any order.
struct Order { u16 at[264]; };

// 8 elements of a row of C.
DEV void store_chunk(u16 *C, int M, int N, int row, int column, uint4 v) {
  u16 *at = C + (u64)row * N + column;
  if (EDGES == 2) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 8; e++)
      if (row < M && column + e < N) at[e] = (u16)(word[e / 2] >> e % 2 * 16);
  } else if (EDGES == 0 || (row < M && column < N)) {
    *(uint4 *)at = v;
  }
}
// A warp's 16 x W part of C: fragments through shared memory, so that global stores are 16 bytes and rows contiguous.
// (Storing fragments straight from registers, 4 bytes a thread, is 0.3 to 1.5 us slower.)
template <int W, class T> DEV void store_rows(u16 *C, int M, int N, const T *sums, int row, int column, u32 stage, int lane) {
  constexpr int PITCH = W * 2 + 16, CHUNKS = W / 8, ALL = 16 * CHUNKS;
#pragma unroll
  for (int j = 0; j < W / 8; j += 2)
    if (j + 1 < W / 8)
      stmatrix4<false>(stage + (lane & 15) * PITCH + (j + (lane >> 4)) * 16, pair(sums, 2 * j), pair(sums, 2 * j + 1), pair(sums, 2 * j + 2), pair(sums, 2 * j + 3));
    else
      stmatrix2(stage + (lane & 15) * PITCH + j * 16, pair(sums, 2 * j), pair(sums, 2 * j + 1));
  __syncwarp();
#pragma unroll
  for (int q = 0; q < (ALL + 31) / 32; q++) {
    const int i = q * 32 + lane, line = i / CHUNKS, chunk = i % CHUNKS;
    if (ALL % 32 == 0 || i < ALL) store_chunk(C, M, N, row + line, column + chunk * 8, ld_shared(stage + line * PITCH + chunk * 16));
  }
  __syncwarp();
}
// The same for swapped operands: 16 columns x W rows of C.
template <int W, class T> DEV void store_columns(u16 *C, int M, int N, const T *sums, int row, int column, u32 stage, int lane) {
  constexpr int PITCH = 48;  // 32 bytes of data; rows 48 bytes apart do not collide
#pragma unroll
  for (int j = 0; j < W / 8; j += 2)
    stmatrix4<true>(stage + ((j + (lane >> 4)) * 8 + (lane & 7)) * PITCH + ((lane >> 3) & 1) * 16, pair(sums, 2 * j), pair(sums, 2 * j + 1), pair(sums, 2 * j + 2), pair(sums, 2 * j + 3));
  __syncwarp();
#pragma unroll
  for (int q = 0; q < W * 2 / 32; q++) {
    const int i = q * 32 + lane, line = i / 2, chunk = i % 2;
    store_chunk(C, M, N, row + line, column + chunk * 8, ld_shared(stage + line * PITCH + chunk * 16));
  }
  __syncwarp();
}

#if SL > 1
// ---- the exchange through L2
// Fill pattern of the polled workspace. It is a NaN; a sum with these very bits is sent as the NaN below it.
constexpr u32 EMPTY = 0xffffffffu;
constexpr int SPINS = 1 << 22;  // then the result is wrong, but the device is free again; about three seconds
DEV void st_relaxed(u32 *p, const u32 (&x)[4]) { asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory"); }
DEV void st_relaxed(u32 *p, const u32 (&x)[2]) { asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x[0]), "r"(x[1]) : "memory"); }
template <int V> DEV void ld_relaxed(const u32 *p, u32 *x) {
  if (V == 4) asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(p) : "memory");
  else asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(p) : "memory");
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MINB)
gemm(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_y, u16 *__restrict__ C,
#if SL > 1
     u32 *__restrict__ parts,  // tiles * CK * SL * (SL - 1) * RL * NC fp32 sums; polled: EMPTY, found and left so
#endif
#if SL > 1 && COUNT
     u32 *__restrict__ counters,  // tiles * CK * SL zeros, found and left so
#endif
     int M, int N, int K, const __grid_constant__ Order order
#if PDL
     , int dependent  // launched so: only then do dependents of our own follow
#endif
) {
  extern __shared__ char smem_raw[];
  __shared__ alignas(8) u64 bars[2 * STAGES + 1];
  u32 full = smem_addr(bars);
  asm volatile("" : "+r"(full));  // else its address is worked out again in front of every use
  const u32 empty = full + STAGES * 8, inbox_bar = full + STAGES * 16;
  const u32 ring = (smem_addr(smem_raw) + 1023) & ~1023u;
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), lane = tid & 31;
#if PDL == 1
  if (dependent) pdl_trigger();
#endif

  // ---- which tile, which part of K
  const int rank = CS > 1 ? blockIdx.x % CS : 0, group = blockIdx.x / CS;
  const int cm = rank % CM, cn = (rank / CM) % CN, ck = rank / (CM * CN), sl = SL > 1 ? blockIdx.y : 0;
  const int tile = order.at[group], row0 = ((tile & 255) * CM + cm) * BM, col0 = ((tile >> 8) * CN + cn) * BN;
  const int part = sl * CK + ck, steps = (K + 64 * KB - 1) / (64 * KB), share = steps / (CK * SL), extra = steps % (CK * SL);
  const int k0 = part * share + least(part, extra), n = share + (part < extra ? 1 : 0);

  // ---- producer: one thread
  const u16 mask_x = (u16)((((1u << (CM * CN)) - 1) / ((1u << CM) - 1)) << (cm + ck * CM * CN));
  const u16 mask_y = (u16)(((1u << CM) - 1) << (cn * CM + ck * CM * CN));
  auto load = [&](int step, int s, auto shared) {
    constexpr bool SHARED_X = decltype(shared)::value && CN > 1, SHARED_Y = decltype(shared)::value && CM > 1;
    const u32 bar = full + s * 8, x = ring + s * STAGE_BYTES, y = x + X_BYTES;
    bar_expect(bar, STAGE_BYTES);
#pragma unroll
    for (int c = 0; c < (SHARED_X ? 1 : CN); c++)
      load_slice<X_MN, X_FLAT, KB, BM, BM / CN, MULTI, SHARED_X>(x, &map_x, row0, (SHARED_X ? cn : c) * (BM / CN), step, bar, mask_x);
#pragma unroll
    for (int c = 0; c < (SHARED_Y ? 1 : CM); c++)
      load_slice<Y_MN, Y_FLAT, KB, BN, BN / CM, MULTI, SHARED_Y>(y, &map_y, col0, (SHARED_Y ? cm : c) * (BN / CM), step, bar, mask_y);
  };
  // Whatever needs no other block is in flight before the block's first barrier, the first load before the other barriers are
  // set up. The vote instead of the warp's number, which comes through a shuffle, is there sooner. Each is worth 1 % where a
  // launch takes 2 to 5 us.
  const int early = least(n, MULTI ? LOCAL : STAGES);
  if (__any_sync(~0u, tid >= NC && tid < NC + 32) && elect_one()) {
    bar_init(full, 1);
    bar_init_fence();
    pdl_wait();
    if (early > 0) load(k0, 0, constant<false>());
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      if (s > 0) bar_init(full + s * 8, 1);
      bar_init(empty + s * 8, NWG * (MULTI ? CM + CN - 1 : 1));
    }
    if (CK > 1) bar_init(inbox_bar, 1);
    bar_init_fence();
    if (CK > 1) bar_expect(inbox_bar, INBOX_BYTES);
#pragma unroll 1
    for (int i = 1; i < early; i++) load(k0 + i, i, constant<false>());
  }
  __syncthreads();
  if (CS > 1) cluster_arrive();

  if (warp >= NC / 32) {
    if (SPLIT_REGS) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NWG == 3 ? 32 : 40));
    if (MULTI) cluster_wait();
    if (warp == NC / 32 && elect_one()) {
      int i = early;
      if (MULTI)
#pragma unroll 1
        for (; i < n && i < STAGES; i++) load(k0 + i, i, constant<true>());
      int s = 0;
      u32 parity = 0;
#pragma unroll 1
      for (; i < n; i++) {
        bar_wait(empty + s * 8, parity);
        load(k0 + i, s, constant<true>());
        if (++s == STAGES) s = 0, parity ^= 1;
      }
    }
    __syncwarp();
    if (!MULTI && CK > 1) cluster_wait();
    // No block leaves while another may still signal its barriers.
    if (MULTI) {
      cluster_arrive();
      cluster_wait();
    }
    return;
  }

  // ---- consumers
  if (SPLIT_REGS) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NWG == 3 ? 160 : 232));
  if (MULTI) cluster_wait();
  const int wg = warp >> 2;
  Sum acc[MW][WORDS];
  const u32 low_x = desc_low(ring, X_MN ? KB * 8192 : 16) + operand_at<X_MN, KB, BM>(1, 0, 0) * (wg * MW);
  const u32 low_y = desc_low(ring + X_BYTES, Y_MN ? KB * 8192 : 16);
  const bool reuse = n > STAGES;
  auto release = [&](int s) {
    if (MULTI) {
      // to every block that writes this stage of ours: ours and those in our row and column of the cluster
      const int i = tid & 127;
      if (i < CM + CN - 1) {
        const int c = i < CM ? cn * CM + i : ((i - CM) + (i - CM >= cn ? 1 : 0)) * CM + cm;
        bar_arrive_remote(empty + s * 8, c + ck * CM * CN);
      }
    } else if ((tid & 127) == 0) {
      bar_arrive(empty + s * 8);
    }
  };
  int s = 0, before = 0;
  u32 parity = 0;
#pragma unroll 1  // here and above: a short kernel feels every instruction-cache miss
  for (int i = 0; i < n; i++) {
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

  const int wrow = row0 + wg * MW * 64 + (warp & 3) * 16;  // first row (column, if swapped) of this warp in slab 0
  const u32 stage = ring + warp * (SWAP ? BN * 48 : 16 * (BN * 2 + 16));
  if constexpr (PLAIN) {
#pragma unroll
    for (int m = 0; m < MW; m++)
      if constexpr (SWAP) store_columns<BN>(C, M, N, acc[m], col0, wrow + m * 64, stage, lane);
      else store_rows<BN>(C, M, N, acc[m], wrow + m * 64, col0, stage, lane);
  } else {
    // ---- reduction over the cluster: rank ck keeps sums [ck * RK, (ck + 1) * RK) of every thread
    float own[RK], sum[R];
#pragma unroll
    for (int m = 0; m < MW; m++)
#pragma unroll
      for (int i = 0; i < WORDS; i++) widen(acc[m][i], &sum[m * NA + i * (NA / WORDS)]);
    if constexpr (CK > 1) {
      const u32 inbox = ring + STAGES * STAGE_BYTES;  // [CK - 1 senders][RK / VK][NC][VK] floats
      if (!MULTI) cluster_wait();                     // every peer has armed its barrier
#pragma unroll
      for (int o = 0; o < CK; o++) {
        if (o == ck) {
#pragma unroll
          for (int i = 0; i < RK; i++) own[i] = sum[o * RK + i];
        } else {
          const int slot = ck - (ck > o ? 1 : 0);  // our place among o's senders
          const u32 dst = map_rank(inbox + (slot * RK * NC + tid * VK) * 4, (o * CN + cn) * CM + cm);
          const u32 bar = map_rank(inbox_bar, (o * CN + cn) * CM + cm);
#pragma unroll
          for (int i = 0; i < RK; i += VK) {
            const u32 d = dst + i * NC * 4;
            const float *f = &sum[o * RK + i];
            if constexpr (VK == 4)
              asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(d), "f"(f[0]), "f"(f[1]), "f"(f[2]), "f"(f[3]), "r"(bar) : "memory");
            else
              asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(d), "f"(f[0]), "f"(f[1]), "r"(bar) : "memory");
          }
        }
      }
      bar_wait(inbox_bar, 0);
#pragma unroll
      for (int j = 0; j < CK - 1; j++) {
        const u32 src = inbox + (j * RK * NC + tid * VK) * 4;
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
      for (int i = 0; i < RK; i++) own[i] = sum[i];
    }
    // ---- reduction over the L2 parts: part sl keeps [sl * RL, (sl + 1) * RL) of own; all blocks are resident
    float out[RL];
#if SL > 1
    const int unit = ((group * CN + cn) * CM + cm) * CK + ck;
    u32 *box = parts + (u64)unit * SL * (SL - 1) * RL * NC;  // [owner][SL - 1 senders][RL / VL][NC][VL]
#pragma unroll
    for (int o = 0; o < SL; o++) {
      if (o == sl) {
#pragma unroll
        for (int i = 0; i < RL; i++) out[i] = own[o * RL + i];
      } else {
        u32 *w = box + (u64)(o * (SL - 1) + sl - (sl > o ? 1 : 0)) * RL * NC + tid * VL;
#pragma unroll
        for (int i = 0; i < RL; i += VL) {
          u32 x[VL];
#pragma unroll
          for (int e = 0; e < VL; e++) {
            x[e] = __float_as_uint(own[o * RL + i + e]);
            if (!COUNT) x[e] = least(x[e], EMPTY - 1);
          }
          st_relaxed(w + i * NC, x);
        }
      }
    }
    u32 *in = box + (u64)sl * (SL - 1) * RL * NC + tid * VL;
#if COUNT
    u32 *count = counters + unit * SL;
    named_sync(1, NC);
    if (tid < SL && tid != sl) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count + tid) : "memory");
    if (tid == 0) {
      u32 v;
      int spins = 0;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(count + sl) : "memory");
      } while (v != SL - 1 && ++spins < SPINS);
      count[sl] = 0;  // all senders have counted: the workspace is as it was found
    }
    named_sync(1, NC);
#endif
    // senders read at once, by registers
    constexpr int GROUP = SL * RL <= 64 ? SL - 1 : 64 / RL > 0 ? 64 / RL : 1;
#pragma unroll
    for (int j0 = 0; j0 < SL - 1; j0 += GROUP) {
      u32 x[GROUP][RL];
      bool ready;
      int spins = 0;
      do {
        ready = true;
#pragma unroll
        for (int j = 0; j < GROUP; j++)
          if (j0 + j < SL - 1)
#pragma unroll
            for (int i = 0; i < RL; i += VL) ld_relaxed<VL>(in + (u64)(j0 + j) * RL * NC + i * NC, &x[j][i]);
        if constexpr (!COUNT) {
#pragma unroll
          for (int j = 0; j < GROUP; j++)
            if (j0 + j < SL - 1)
#pragma unroll
              for (int i = 0; i < RL; i++) ready &= x[j][i] != EMPTY;
        }
      } while (!ready && ++spins < SPINS);
#pragma unroll
      for (int j = 0; j < GROUP; j++)
        if (j0 + j < SL - 1)
#pragma unroll
          for (int i = 0; i < RL; i += VL) {
#pragma unroll
            for (int e = 0; e < VL; e++) out[i + e] += __uint_as_float(x[j][i + e]);
            if constexpr (!COUNT) {
              u32 fill[VL];
#pragma unroll
              for (int e = 0; e < VL; e++) fill[e] = EMPTY;
              st_relaxed(in + (u64)(j0 + j) * RL * NC + i * NC, fill);
            }
          }
    }
#else
#pragma unroll
    for (int i = 0; i < RL; i++) out[i] = own[i];
#endif
    const int first = ck * RK + sl * RL;  // of the thread's sums, ours now
    if constexpr (RL >= NA) {
#pragma unroll
      for (int m = 0; m < RL / NA; m++) store_rows<BN>(C, M, N, out + m * NA, wrow + (first / NA + m) * 64, col0, stage, lane);
    } else if constexpr (RL >= 4) {
      store_rows<RL * 2>(C, M, N, out, wrow + first / NA * 64, col0 + first % NA * 2, stage, lane);
    } else {
      const int y = first % NA, row = wrow + first / NA * 64 + (lane >> 2) + ((y & 2) ? 8 : 0);
      const int column = col0 + (y >> 2) * 8 + (lane & 3) * 2;
      const u32 word = pair(out, 0);
      u16 *at = C + (u64)row * N + column;
      if (EDGES < 2) {
        if (EDGES == 0 || (row < M && column < N)) *(u32 *)at = word;
      } else {
        if (row < M && column < N) at[0] = (u16)word;
        if (row < M && column + 1 < N) at[1] = (u16)(word >> 16);
      }
    }
  }
  if (MULTI) cluster_wait();
}
