#pragma once
/* The instructions of the GPU families of tasks that C++ has no words for. CUDA_ON_CPU: a compiler for CPUs brings its own. */
#define DEVICE [[maybe_unused]] static __device__ __forceinline__
#ifndef CUDA_ON_CPU

#define DYNAMIC_SHARED(name) extern __shared__ uint4 name[] /* sized by the launch */

DEVICE float quick_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* Loads that leave L1 to others. */
DEVICE unsigned char read_around(const unsigned char *p) { return __ldg(p); }
DEVICE unsigned short read_around(const unsigned short *p) {
  unsigned short w;
  asm("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(w) : "l"(p));
  return w;
}
DEVICE unsigned read_around(const unsigned *p) {
  unsigned w;
  asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w) : "l"(p));
  return w;
}
DEVICE uint2 read_around(const uint2 *p) {
  uint2 w;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "l"(p));
  return w;
}
DEVICE uint4 read_around(const uint4 *p) {
  uint4 w;
  asm("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
      : "l"(p));
  return w;
}

/* BYTES (4, 8, 16) to shared memory while the thread goes on; what it copied it may read after copied(). */
template <int BYTES>
DEVICE void copy(void *shared, const void *global) {
  const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(BYTES == 16 ? 4 : BYTES) : "memory");
}
/* 16 bytes, or as many zeros. */
DEVICE void copy_or_zero(void *shared, const void *global, bool some) {
  const unsigned to = (unsigned)__cvta_generic_to_shared(shared), bytes = some ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
DEVICE void copied() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* Clusters: this block's place, the meeting of all threads, a word into the same place of another block. */
DEVICE unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_store(void *shared, unsigned rank, unsigned word) {
  const unsigned own = (unsigned)__cvta_generic_to_shared(shared);
  unsigned other;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(own), "r"(rank));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(other), "r"(word) : "memory");
}

/* Four 8 x 8 matrices of 16-bit elements from the rows whose addresses lanes 0-7, 8-15, 16-23 and 24-31 bring. */
DEVICE void load_matrices(unsigned (&r)[4], const void *row) {
  const unsigned from = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
DEVICE void load_transposed(unsigned (&r)[4], const void *row) {
  const unsigned from = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
/* d += A B: A 16 x 16, B 16 x 8, both of the task's 16-bit type. */
#if DTYPE == 17
#define OPERANDS "bf16.bf16"
#else
#define OPERANDS "f16.f16"
#endif
DEVICE void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." OPERANDS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
