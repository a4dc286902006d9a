// Thin names for the PTX that the kernels below use. Nothing here knows about GEMM.
#pragma once
#include <cuda.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define DEV static __device__ __forceinline__

DEV uint32_t smem_addr(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DEV uint32_t cluster_rank() { uint32_t r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEV uint32_t map_rank(uint32_t addr, uint32_t rank) {
  uint32_t r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank)); return r;
}

// True in one lane of a converged warp. ptxas knows that only one thread is active then, and keeps addresses and
// coordinates in uniform registers; with `lane == 0` it wraps every TMA instruction in a loop over distinct values.
DEV bool elect_one() {
  uint32_t p; asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(p)); return p != 0;
}

// ---- mbarriers
DEV void bar_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(b), "r"(n)); }
DEV void bar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void bar_expect(uint32_t b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(b), "r"(bytes) : "memory");
}
DEV void bar_arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(b) : "memory"); }
// The plain remote form: an explicit .release.cluster costs a GPU-wide memory barrier in the main loop.
DEV void bar_arrive_remote(uint32_t b, uint32_t rank) {
  asm volatile("{ .reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [r]; }"
               :: "r"(b), "r"(rank) : "memory");
}
// No __trap after a spin limit: a trap keeps ptxas from using the registers that setmaxnreg grants (wide accumulators then
// spill and wgmma is serialised). -DBOUNDED_WAIT gives up instead, so that a wrong protocol shows as a wrong result, not a hang.
DEV void bar_wait(uint32_t b, uint32_t parity) {
#ifdef BOUNDED_WAIT
  uint32_t ok; int spins = 0;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ok) : "r"(b), "r"(parity) : "memory");
  } while (!ok && ++spins < (1 << 18));
#else
  asm volatile("{ .reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}"
               :: "r"(b), "r"(parity) : "memory");
#endif
}
// Cluster barrier. Relaxed arrive: initialised mbarriers are published by bar_init_fence, data by mbarriers.
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEV void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }
DEV void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// PDL = 0 builds carry no dependent-launch instruction at all.
#ifndef PDL
#define PDL 1
#endif
DEV void pdl_wait() { if (PDL) asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void pdl_trigger() { if (PDL) asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- tensor memory accelerator
// STREAM: data read once; the policy constant is createpolicy's for L2::evict_first with fraction 1.
constexpr uint64_t EVICT_FIRST = 0x12F0000000000000ull;
template <int STREAM = 0> DEV void tma_load(uint32_t dst, const CUtensorMap* m, int x, int y, int z, uint32_t bar) {
  if (STREAM) asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;"
               :: "r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z), "l"(EVICT_FIRST) : "memory");
  else asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
               :: "r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z) : "memory");
}
template <int STREAM = 0> DEV void tma_load_multicast(uint32_t dst, const CUtensorMap* m, int x, int y, int z, uint32_t bar, uint16_t mask) {
  if (STREAM) asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;"
               :: "r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(mask), "l"(EVICT_FIRST) : "memory");
  else asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;"
               :: "r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(mask) : "memory");
}
template <int STREAM = 0> DEV void tma_store(const CUtensorMap* m, uint32_t src, int x, int y) {
  if (STREAM) asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;"
               :: "l"(m), "r"(src), "r"(x), "r"(y), "l"(EVICT_FIRST) : "memory");
  else asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
               :: "l"(m), "r"(src), "r"(x), "r"(y) : "memory");
}
DEV void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> DEV void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory"); }

// ---- warpgroup MMA
// Shared-memory descriptor of a 128-byte-swizzled tile: the high word never changes, and an offset may be added to the
// low word after its shift because shared memory ends below 2^18 bytes. lbo in bytes, used by MN-major operands only.
constexpr uint32_t DESC_HIGH = 1u << 30 | 1024 >> 4;
DEV uint32_t desc_low(uint32_t addr, uint32_t lbo) { return (addr & 0x3ffff) >> 4 | (lbo >> 4) << 16; }
DEV uint64_t desc(uint32_t low) { uint64_t d; asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(DESC_HIGH)); return d; }
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }

// ---- memory operations with a stated scope
DEV void st_relaxed4(float* p, float a, float b, float c, float d) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(p), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
DEV void st_relaxed2(float* p, float a, float b) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" :: "l"(p), "f"(a), "f"(b) : "memory");
}
DEV void ld_relaxed4(const float* p, uint32_t* x) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(p) : "memory");
}
DEV void ld_relaxed2(const float* p, uint32_t* x) {
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(p) : "memory");
}
DEV uint32_t pack2(float lo, float hi) { __half2 h = __floats2half2_rn(lo, hi); return *(uint32_t*)&h; }
