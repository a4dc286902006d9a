/* cuda-l2
target = "cuda"
arch = "sm_80"
[names]
blocks = "min(8 * sms, cdiv(rows * columns, 4096))"

[[buffer]]
name = "x"
shape = ["rows", "columns"]
dtype = "float32"
kind = "input"

[[buffer]]
name = "y"
shape = ["rows", "columns"]
dtype = "float32"
kind = "input"

[[buffer]]
name = "out"
shape = []
dtype = "float32"
kind = "output"

[[workspace]]
name = "of_blocks"
bytes = "4 * blocks"


[[workspace]]
name = "ended"
bytes = "4"
kind = "persistent"

[[launch]]
kernel = "partial"
grid = ["blocks"]
block = [256]
args = ["x", "y", "of_blocks", "ended", "out", {int64 = "rows * columns"}]
*/
#define OPERATION 1
#define DTYPE 32
#define VEC 4
#define THREADS 256
#define ITEMS 4
#define TAIL 1
#define LOAD 1
#define QUICK 0

/* Kernels that add up a term of every element of one or two tensors: sums and mean losses.
 *
 * Set from outside: OPERATION (below), DTYPE, VEC (elements a load), ITEMS (vectors a thread has in flight), THREADS, TAIL (who
 * adds up what blocks found: 0 a second launch, 1 the block that ends last), LOAD, QUICK.
 *
 * TERM is one element's, of x and y, floats; RESULT what becomes of the total of `count` terms. */
/* What the GPU kernels of tasks share: element types, vectors, cache policies, quick mathematics.
 *
 * DTYPE: 32 float, 16 half, 17 bfloat16. LOAD: 0 plain, 1 evict first, 2 around L1. STORE: 0 plain, 1 evict first.
 * QUICK: 1 takes exponentials and quotients from the hardware's approximations (2^-22), 0 rounds them well. */
#ifndef DTYPE
#define DTYPE 32
#endif
#ifndef LOAD
#define LOAD 0
#endif
#ifndef STORE
#define STORE 0
#endif
#ifndef QUICK
#define QUICK 0
#endif
#if DTYPE == 16
#include <cuda_fp16.h>
#elif DTYPE == 17
#include <cuda_bf16.h>
#endif

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

#define LOWEST -3.402823466e38f /* as a first maximum: unlike -inf it can be taken from -inf */

#if DTYPE == 16
typedef __half real;
DEVICE float widened(real x) { return __half2float(x); }
DEVICE real narrowed(float x) { return __float2half_rn(x); }
#elif DTYPE == 17
typedef __nv_bfloat16 real;
DEVICE float widened(real x) { return __bfloat162float(x); }
DEVICE real narrowed(float x) { return __float2bfloat16_rn(x); }
#else
typedef float real;
DEVICE real narrowed(float x) { return x; }
#endif
DEVICE float widened(float x) { return x; }
DEVICE float widened(signed char x) { return (float)x; }
DEVICE float widened(unsigned char x) { return (float)x; }

/* N neighbours, moved by one instruction. */
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};
template <int BYTES>
struct Word;
template <>
struct Word<1> {
  typedef unsigned char type;
};
template <>
struct Word<2> {
  typedef unsigned short type;
};
template <>
struct Word<4> {
  typedef unsigned type;
};
template <>
struct Word<8> {
  typedef uint2 type;
};
template <>
struct Word<16> {
  typedef uint4 type;
};

/* Inputs: read once, or again soon. */
template <int N, typename T>
DEVICE Pack<T, N> read_once(const T *p) {
  typedef typename Word<sizeof(T) * N>::type word;
  Pack<T, N> pack;
#if LOAD == 1
  *(word *)pack.at = __ldcs((const word *)p);
#elif LOAD == 2
  *(word *)pack.at = read_around((const word *)p);
#else
  *(word *)pack.at = __ldg((const word *)p);
#endif
  return pack;
}
template <int N, typename T>
DEVICE Pack<T, N> read(const T *p) {
  typedef typename Word<sizeof(T) * N>::type word;
  Pack<T, N> pack;
  *(word *)pack.at = __ldg((const word *)p);
  return pack;
}
template <int N, typename T>
DEVICE void write(T *p, const Pack<T, N> &pack) {
  typedef typename Word<sizeof(T) * N>::type word;
#if STORE
  __stcs((word *)p, *(const word *)pack.at);
#else
  *(word *)p = *(const word *)pack.at;
#endif
}

DEVICE float exponential(float x) {
#if QUICK
  return quick_exp2(x * 1.44269504f);
#else
  return expf(x);
#endif
}
DEVICE float quotient(float x, float y) {
#if QUICK
  return __fdividef(x, y);
#else
  return x / y;
#endif
}
/* NaN stays NaN, as torch's clamp and relu have it. */
DEVICE float clipped(float x, float least, float most) { return x < least ? least : x > most ? most : x; }
DEVICE bool is_nan(float x) { return x != x; }
/* Sums over blocks, in an order that does not depend on when they end. */

/* The sum over the threads of a block of whole warps, in every thread. */
DEVICE float sum_over_block(float sum) {
  __shared__ float sums[32];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  if (blockDim.x == 32) return sum;
  __syncthreads(); /* an earlier sum has been read */
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < (int)blockDim.x / 32; i++) sum += sums[i];
  return sum;
}

/* The sum of numbers that other blocks or launches wrote, in every thread. */
DEVICE float sum_of(const float *numbers, int count) {
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += __ldcg(numbers + i);
  return sum_over_block(sum);
}

/* Whether all other blocks of `blocks` have come here, with what they wrote before to be seen. `ended` begins at 0 and ends so. */
DEVICE bool last_block(unsigned *ended, unsigned blocks = gridDim.x) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(ended, blocks - 1) == blocks - 1;
  __syncthreads();
  __threadfence();
  return last;
}

#ifndef OPERATION
#define OPERATION 0
#endif
#ifndef VEC
#define VEC 4
#endif
#ifndef ITEMS
#define ITEMS 4
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef TAIL
#define TAIL 0
#endif

#if OPERATION == 0 /* sum_all */
#define INPUTS 1
#define TERM x
#define RESULT total
#elif OPERATION == 1 /* mse */
#define TERM (x - y) * (x - y)
#elif OPERATION == 2 /* huber */
#define TERM huber(fabsf(x - y))
#elif OPERATION == 3 /* binary_cross_entropy of logits */
#define SECOND unsigned char
#define TERM softplus(y != 0 ? -x : x, exponential(-fabsf(x)))
#elif OPERATION == 4 /* focal */
#define SECOND unsigned char
#define TERM focal(y != 0 ? -x : x, exponential(-fabsf(x)), y != 0 ? 0.25f : 0.75f)
#elif OPERATION == 5 /* hinge */
#define SECOND unsigned char
#define TERM hinge(y != 0 ? 1 - x : 1 + x)
#endif
#ifndef INPUTS
#define INPUTS 2
#endif
#ifndef SECOND
#define SECOND real
#endif
#ifndef RESULT
#define RESULT total / count
#endif

DEVICE float huber(float distance) { return distance < 1 ? 0.5f * distance * distance : distance - 0.5f; }
DEVICE float hinge(float x) { return x < 0 ? 0 : x; }
/* ln(1 + e^u); e is e^-|u|. */
DEVICE float softplus(float u, float e) { return (u < 0 ? 0 : u) + log1pf(e); }
DEVICE float focal(float u, float e, float alpha) {
  const float missed = quotient(u < 0 ? e : 1, 1 + e);
  return alpha * missed * missed * softplus(u, e);
}

struct Packs {
  Pack<real, VEC> x;
  Pack<SECOND, VEC> y;
};
DEVICE float term(float x, float y) {
  (void)y;
  return TERM;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    partial(const real *x, const SECOND *y, float *of_blocks, unsigned *ended, real *result, long long count) {
  const long long vectors = count / VEC, step = (long long)gridDim.x * THREADS * ITEMS;
  float sums[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) sums[i] = 0;
  for (long long first = (long long)blockIdx.x * THREADS * ITEMS + threadIdx.x; first < vectors; first += step) {
    Packs p[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * THREADS < vectors) {
        p[i].x = read_once<VEC>(x + (first + i * THREADS) * VEC);
        if (INPUTS > 1) p[i].y = read_once<VEC>(y + (first + i * THREADS) * VEC);
      }
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * THREADS < vectors)
#pragma unroll
        for (int k = 0; k < VEC; k++) sums[i] += term(widened(p[i].x.at[k]), INPUTS > 1 ? widened(p[i].y.at[k]) : 0);
  }
  float sum = sums[0];
#pragma unroll
  for (int i = 1; i < ITEMS; i++) sum += sums[i];
  if (blockIdx.x == 0 && vectors * VEC + threadIdx.x < count) { /* what no whole vector holds */
    const long long at = vectors * VEC + threadIdx.x;
    sum += term(widened(x[at]), INPUTS > 1 ? widened(y[at]) : 0);
  }
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) of_blocks[blockIdx.x] = sum;
#if TAIL
  if (last_block(ended)) {
    const float total = sum_of(of_blocks, gridDim.x);
    if (threadIdx.x == 0) *result = narrowed(RESULT);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(1024)
    add_up(const float *of_blocks, real *result, int blocks, long long count) {
  const float total = sum_of(of_blocks, blocks);
  if (threadIdx.x == 0) *result = narrowed(RESULT);
}
