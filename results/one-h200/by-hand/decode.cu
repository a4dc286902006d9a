/* cuda-l2
target = "cuda"
arch = "sm_90a"
dtype = "bfloat16"
layouts = ["tn"]

[[tensor_map]]
name = "map_a"
tensor = "a"
dims = [64, "m", "k / 64"]
strides = ["2 * k", 128]
box = [64, 16, 1]
swizzle = "128B"

[[tensor_map]]
name = "map_b"
tensor = "b"
dims = [64, "n", "k / 64"]
strides = ["2 * k", 128]
box = [64, 64, 1]
swizzle = "128B"
l2_promotion = "256B"

[[launch]]
kernel = "gemm"
grid = ["max(n / 64 * 2, sms)"]
block = [160]
cluster = [2]
shared_bytes = 105472
args = ["map_a", "map_b", "c"]
edge = "programmatic"
*/
// C (16 x 4096) = A (16 x 4096) B^T, bf16. A cluster of 2 blocks computes 64 columns of C, each block half of K.
// B lies on the 64-row axis of wgmma, A on its N axis (16). Sums are exchanged through distributed shared memory.
// Two blocks fit a multiprocessor: those of the next launch are set up while this one runs.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 words[16]; };
#define DEV __device__ __forceinline__

constexpr int N = 4096, K = 4096;
constexpr int CK = 2, KPART = K / CK, STEPS = KPART / 64;  // 32 steps of 64
constexpr int BN = 64, STAGES = 10;
constexpr u32 B_BYTES = BN * 128, STAGE_BYTES = B_BYTES + 16 * 128;
constexpr u32 INBOX_BYTES = 128 * 16;

DEV u32 smem_addr(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEV u32 map_rank(u32 addr, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank));
  return r;
}
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
DEV void bar_arrive(u32 b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(b) : "memory"); }
DEV void bar_wait(u32 b, u32 parity) {
  asm volatile("{ .reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(b), "r"(parity)
               : "memory");
}
// What createpolicy gives for L2::evict_first and L2::evict_last with fraction 1.
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_LAST = 0x14F0000000000000ull;
DEV void tma_load(u32 dst, const TensorMap *m, int x, int y, int z, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z), "l"(policy)
               : "memory");
}
constexpr u32 DESC_HIGH = 1u << 30 | 1024 >> 4;
DEV u32 desc_low(u32 addr) { return (addr & 0x3ffff) >> 4 | 1u << 16; }
DEV u64 desc(u32 low) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(DESC_HIGH));
  return d;
}
DEV void wgmma(float (&d)[8], u64 x, u64 y, int accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;"
               " wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0; }"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "l"(x), "l"(y), "r"(accumulate));
}
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int P> DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(P) : "memory"); }
DEV void send_async(u32 to, float x, float y, float z, float w, u32 bar) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(x), "f"(y), "f"(z), "f"(w), "r"(bar)
               : "memory");
}
DEV u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

extern "C" __global__ void __launch_bounds__(160, 2)
gemm(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, u16 *__restrict__ C) {
  extern __shared__ char smem_raw[];
  __shared__ alignas(8) u64 bars[2 * STAGES + 1];
  const u32 full = smem_addr(bars), empty = full + STAGES * 8, inbox_bar = full + STAGES * 16;
  const u32 ring = (smem_addr(smem_raw) + 1023) & ~1023u, inbox = ring + STAGES * STAGE_BYTES;
  const int tid = threadIdx.x, warp = __shfl_sync(~0u, tid >> 5, 0), lane = tid & 31;
  const int rank = blockIdx.x % CK, col0 = blockIdx.x / CK * BN;
  const int kb0 = rank * STEPS;  // in blocks of 64

  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // Blocks without work only hold a place until the launch before has ended, so that every multiprocessor gets one block of
  // each launch, and none gets two.
  if (blockIdx.x >= N / BN * CK) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    return;
  }
  if (warp == 4 && elect_one()) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map_b) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map_a) : "memory");
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      bar_init(full + s * 8, 1);
      bar_init(empty + s * 8, 1);
    }
    bar_init(inbox_bar, 1);
    bar_init_fence();
    bar_expect(inbox_bar, INBOX_BYTES);
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // the peer has armed its inbox
  asm volatile("griddepcontrol.wait;" ::: "memory");

  if (warp == 4) {
    if (elect_one()) {
      int s = 0;
      u32 parity = 1;
#pragma unroll 1
      for (int i = 0; i < STEPS; i++) {
        if (i >= STAGES) bar_wait(empty + s * 8, parity);
        const u32 stage = ring + s * STAGE_BYTES, bar = full + s * 8;
        bar_expect(bar, STAGE_BYTES);
        // The cache holds part of B from launch to launch: every other pair of steps is kept, the others pass through.
        tma_load(stage, &map_b, 0, col0, kb0 + i, bar, (i & 2) == 0 ? EVICT_LAST : EVICT_FIRST);
        tma_load(stage + B_BYTES, &map_a, 0, 0, kb0 + i, bar, EVICT_LAST);
        if (++s == STAGES) s = 0, parity ^= 1;
      }
    }
    return;
  }

  float acc[8];
#pragma unroll
  for (int i = 0; i < 8; i++) acc[i] = 0.0f;
  const u32 low = desc_low(ring);
  int s = 0, before = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int i = 0; i < STEPS; i++) {
    bar_wait(full + s * 8, parity);
    const u32 x = low + s * (STAGE_BYTES >> 4), y = x + (B_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int k16 = 0; k16 < 4; k16++) wgmma(acc, desc(x + k16 * 2), desc(y + k16 * 2), (i | k16) != 0);
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0 && tid == 0) bar_arrive(empty + before * 8);
    before = s;
    if (++s == STAGES) s = 0, parity ^= 1;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < 8; i++) asm volatile("" : "+f"(acc[i])::"memory");

  // acc[4 j + 2 h + e]: column col0 + warp 16 + 8 h + lane/4 of C, row 8 j + lane%4 2 + e. Block j of the cluster keeps j.
  const u32 peer = rank ^ 1;
  float own[4], sent[4], got[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    own[i] = rank ? acc[4 + i] : acc[i];
    sent[i] = rank ? acc[i] : acc[4 + i];
  }
  send_async(map_rank(inbox + tid * 16, peer), sent[0], sent[1], sent[2], sent[3], map_rank(inbox_bar, peer));
  bar_wait(inbox_bar, 0);
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(got[0]), "=f"(got[1]), "=f"(got[2]), "=f"(got[3]) : "r"(inbox + tid * 16) : "memory");
  const int r = lane >> 2, c = lane & 3;
  u16 *at = C + (rank * 8 + r) * N + col0 + warp * 16 + c * 2;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const u32 word = pack(own[2 * h] + got[2 * h], own[2 * h + 1] + got[2 * h + 1]);  // rows 2 c, 2 c + 1 of column r
    const u32 first = __shfl_sync(~0u, word, 8 * c + (r >> 1)), second = __shfl_sync(~0u, word, 8 * c + 4 + (r >> 1));
    *reinterpret_cast<u32 *>(at + 8 * h) = __byte_perm(first, second, r & 1 ? 0x7632 : 0x5410);
  }
}
