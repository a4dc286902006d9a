#pragma once
// Thin names for Hopper's PTX: mbarriers, the tensor memory accelerator, descriptors of wgmma operands, scoped memory
// operations. Nothing here knows of matrices' products.
typedef unsigned short u16;  // also an element's bits: nothing here computes in 16 bits but the tensor cores
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 words[16]; };  // CUtensorMap, without the header that declares it

#define DEV __device__ __forceinline__

template <bool B> struct constant { static constexpr bool value = B; };
template <class T> DEV T least(T a, T b) { return b < a ? b : a; }
DEV u32 smem_addr(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEV u32 map_rank(u32 addr, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank));
  return r;
}

// True in one lane of a converged warp, always the same. ptxas knows that only one thread is active then, and keeps
// addresses and coordinates in uniform registers; with `lane == 0` it wraps every TMA instruction in a loop over distinct
// values. It must stand in the `if` itself.
DEV bool elect_one() {
  u32 p;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(p));
  return p != 0;
}

// ---- mbarriers
DEV void bar_init(u32 b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(n)); }
DEV void bar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void bar_expect(u32 b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEV void bar_arrive(u32 b) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(b) : "memory");
}
// The plain remote form: an explicit .release.cluster costs a GPU-wide memory barrier in the main loop.
DEV void bar_arrive_remote(u32 b, u32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(map_rank(b, rank)) : "memory");
}
// Unbounded, and no __trap after a spin limit: a trap keeps ptxas from using the registers that setmaxnreg grants, wide
// accumulators then spill and wgmma is serialised.
DEV void bar_wait(u32 b, u32 parity) {
  asm volatile("{ .reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(b), "r"(parity)
               : "memory");
}
// Cluster barrier. Relaxed arrive: initialised mbarriers are published by bar_init_fence, data by mbarriers.
DEV void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEV void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEV void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEV void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Orders this thread's writes to shared memory before the accelerator's reads of it.
DEV void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// PDL: 0 builds carry no dependent-launch instruction, 1 lets dependents start at the top, 2 after the main loop. A kernel
// that is launched plainly must not let them: where none is there, every later launch of the context takes 0.18 us longer.
DEV void pdl_wait() {
  if (PDL) asm volatile("griddepcontrol.wait;" ::: "memory");
}
DEV void pdl_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- tensor memory accelerator
// Before a load asks for it, a map is fetched in the time that barriers take.
DEV void prefetch_map(const TensorMap *m) { asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory"); }
DEV void tma_load(u32 dst, const TensorMap *m, int x, int y, int z, u32 bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z)
               : "memory");
}
DEV void tma_load_multicast(u32 dst, const TensorMap *m, int x, int y, int z, u32 bar, u16 mask) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst), "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(mask)
               : "memory");
}
template <bool STREAM> DEV void tma_store(const TensorMap *m, u32 src, int x, int y) {
  constexpr u64 EVICT_FIRST = 0x12F0000000000000ull;  // what createpolicy gives for L2::evict_first with fraction 1
  if (STREAM)
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(m), "r"(src), "r"(x), "r"(y), "l"(EVICT_FIRST)
                 : "memory");
  else
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(m), "r"(src), "r"(x), "r"(y)
                 : "memory");
}
DEV void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> DEV void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// ---- warpgroup MMA
// Shared-memory descriptor of a 128-byte-swizzled tile (PTX ISA, matrix descriptor): the high word never changes, and an
// offset may be added to the low word after its shift because shared memory ends below 2^18 bytes. In a cluster the high
// bits of an address carry the rank; the mask drops them. group_bytes: from 64 columns of an MN-major operand to the next.
constexpr u32 DESC_HIGH = 1u << 30 | 1024 >> 4;
DEV u32 desc_low(u32 addr, u32 group_bytes) { return (addr & 0x3ffff) >> 4 | (group_bytes >> 4) << 16; }
DEV u64 desc(u32 low) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(DESC_HIGH));
  return d;
}
DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// ---- pairs of elements
DEV u32 pack(float low, float high) {
  u32 pair;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}
// Pair i of a thread's sums, which are fp32 values or pairs already.
DEV u32 pair(const float *sums, int i) { return pack(sums[2 * i], sums[2 * i + 1]); }
DEV u32 pair(const u32 *sums, int i) { return sums[i]; }
// A register of sums as fp32 values.
DEV void widen(float sum, float *to) { to[0] = sum; }
DEV void widen(u32 sums, float *to) {
  asm("cvt.f32.f16 %0, %1;" : "=f"(to[0]) : "h"((u16)sums));
  asm("cvt.f32.f16 %0, %1;" : "=f"(to[1]) : "h"((u16)(sums >> 16)));
}
// Keeps the compiler from moving reads of the accumulators before the wait that makes them valid.
DEV void pin(float &sum) { asm volatile("" : "+f"(sum)::"memory"); }
DEV void pin(u32 &sum) { asm volatile("" : "+r"(sum)::"memory"); }

// ---- shared memory, 16 bytes at a time
template <bool TRANS> DEV void stmatrix4(u32 at, u32 a, u32 b, u32 c, u32 d) {
  if (TRANS)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
template <bool TRANS> DEV void stmatrix2(u32 at, u32 a, u32 b) {
  if (TRANS)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
DEV uint4 ld_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

// ---- V fp32 values of another block's shared memory (st.async, counted by its mbarrier), of our own, and of L2 (relaxed)
template <int V> DEV void send_async(u32 to, const float *f, u32 bar) {
  if constexpr (V == 4)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(f[0]), "f"(f[1]), "f"(f[2]), "f"(f[3]), "r"(bar)
                 : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(f[0]), "f"(f[1]), "r"(bar)
                 : "memory");
}
template <int V> DEV void ld_shared(u32 at, float *v) {
  if constexpr (V == 4)
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(at) : "memory");
  else
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(at) : "memory");
}
DEV void st_relaxed(u32 *p, const u32 (&x)[4]) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
DEV void st_relaxed(u32 *p, const u32 (&x)[2]) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x[0]), "r"(x[1]) : "memory");
}
template <int V> DEV void ld_relaxed(const u32 *p, u32 *x) {
  if (V == 4)
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(p)
                 : "memory");
  else
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(p) : "memory");
}
