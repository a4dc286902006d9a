/* cuda-l2
target = "cuda"
arch = "sm_80"
[names]

[[buffer]]
name = "x"
shape = ["rows", "columns"]
dtype = "float32"
kind = "input"

[[buffer]]
name = "out"
shape = ["rows", "columns"]
dtype = "float32"
kind = "output"

[[launch]]
kernel = "flat"
grid = ["cdiv(rows * columns, 4096)"]
block = [256]
args = ["x", "x", "x", "x", "out", "out", "out", {int64 = "rows * columns"}]
*/
#define OPERATION 3
#define DTYPE 32
#define VEC 4
#define THREADS 256
#define ITEMS 4
#define GRID 0
#define LOAD 1
#define STORE 1
#define QUICK 0

/* Element-wise kernels: activations, gates, chains with vectors over columns or numbers a row, optimizer steps.
 *
 * Set from outside: OPERATION (below), DTYPE, VEC (elements a load), ITEMS (vectors a thread has in flight), THREADS, WIDE (of
 * them along a row), LOAD, STORE, QUICK. `flat` takes the tensors as one row; `by_columns`, where an operand is a vector over
 * columns or a number a row, gives each thread ITEMS rows of the same columns, so that it reads the vector once.
 *
 * An operation computes o (p, q) from x (y, z, w), all floats; g and h are of the columns, r of the row. */
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

#ifndef OPERATION
#define OPERATION 0
#endif
#ifndef VEC
#define VEC 4
#endif
#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef WIDE
#define WIDE 64
#endif
#define TALL (THREADS / WIDE)

#if OPERATION == 0 /* relu */
#define EACH o = x < 0 ? 0 : x;
#elif OPERATION == 1 /* add */
#define INPUTS 2
#define EACH o = x + y;
#elif OPERATION == 2 /* sigmoid */
#define EACH o = quotient(1, 1 + exponential(-x));
#elif OPERATION == 3 /* gelu */
#define EACH o = gelu(x);
#elif OPERATION == 4 /* gelu_tanh: x times the logistic function of twice the tangent's argument */
#define EACH o = quotient(x, 1 + exponential(x * (x * x * -0.07135481f - 1.59576912f)));
#elif OPERATION == 5 /* softplus */
#define EACH o = (x > 0 ? x : 0) + log1pf(exponential(-fabsf(x)));
#elif OPERATION == 6 /* mish: tanh(ln(1 + e^x)) is n / (n + 2) with n = e^x (e^x + 2), and 1 beyond 20 */
#define EACH \
  const float e = exponential(fminf(x, 20)), n = e * (e + 2); \
  o = x * quotient(n, n + 2);
#elif OPERATION == 7 /* hardswish */
#define EACH o = x * clipped(x + 3, 0, 6) * (1.0f / 6);
#elif OPERATION == 8 /* relu_squared */
#define EACH o = x < 0 ? 0 : x * x;
#elif OPERATION == 9 /* silu_gate */
#define INPUTS 2
#define EACH o = quotient(x, 1 + exponential(-x)) * y;
#elif OPERATION == 10 /* bias_gelu_residual */
#define INPUTS 2
#define VECTORS 1
#define EACH o = y + gelu(x + g);
#elif OPERATION == 11 /* scale_shift_clamp */
#define VECTORS 2
#define EACH o = clipped(x * g + h, -2, 2);
#elif OPERATION == 12 /* masked_dropout */
#define INPUTS 2
#define SECOND unsigned char
#define EACH o = y != 0 ? x * (1.0f / 0.9f) : 0;
#elif OPERATION == 13 /* complex_multiply: real and imaginary parts are neighbours */
#define INPUTS 2
#define UNIT 2
#define EACH o = k % 2 ? x_before * y + x * y_before : x * y - x_after * y_after;
#elif OPERATION == 14 /* dequantise_int8 */
#define FIRST signed char
#define ROW_NUMBERS 1
#define EACH o = x * r;
#elif OPERATION == 15 /* outer_product_update */
#define VECTORS 1
#define ROW_NUMBERS 1
#define EACH o = x - r * g;
#elif OPERATION == 16 /* sgd_momentum: x parameter, y gradient, z momentum */
#define INPUTS 3
#define OUTPUTS 2
#define EACH p = 0.9f * z + y + 1e-4f * x, o = x - 1e-3f * p;
#elif OPERATION == 17 || OPERATION == 18 /* adam, adamw at step 10: w variance */
#define INPUTS 4
#define OUTPUTS 3
#define EACH \
  p = 0.9f * z + 0.1f * y, q = 0.999f * w + 0.001f * (y * y); \
  o = x * (OPERATION == 18 ? 0.9999f : 1.0f) - 1e-3f * ((p / 0.6513215599f) / (sqrtf(q / 0.0099551198f) + 1e-8f));
#elif OPERATION == 19 /* lion */
#define INPUTS 3
#define OUTPUTS 2
#define EACH \
  const float u = 0.9f * z + 0.1f * y; \
  p = 0.99f * z + 0.01f * y, o = x - 1e-3f * ((float)((u > 0) - (u < 0)) + 0.1f * x);
#elif OPERATION == 20 /* rmsprop: z variance */
#define INPUTS 3
#define OUTPUTS 2
#define EACH p = 0.99f * z + 0.01f * (y * y), o = x - 1e-3f * y / (sqrtf(p) + 1e-8f);
#elif OPERATION == 21 /* adagrad: z variance */
#define INPUTS 3
#define OUTPUTS 2
#define EACH p = z + y * y, o = x - 1e-3f * y / (sqrtf(p) + 1e-10f);
#elif OPERATION == 22 /* moving_average: x parameter, y average */
#define INPUTS 2
#define EACH o = y + 0.01f * (x - y);
#elif OPERATION == 23 /* rotary_embedding: x and y, o and p are halves of a row; g cosines and h sines repeat */
#define INPUTS 2
#define OUTPUTS 2
#define VECTORS 2
#define HALVES 1
#define EACH o = x * g - y * h, p = y * g + x * h;
#endif

#ifndef INPUTS
#define INPUTS 1
#endif
#ifndef OUTPUTS
#define OUTPUTS 1
#endif
#ifndef VECTORS
#define VECTORS 0
#endif
#ifndef ROW_NUMBERS
#define ROW_NUMBERS 0
#endif
#ifndef HALVES
#define HALVES 0
#endif
#ifndef UNIT
#define UNIT 1
#endif
#ifndef FIRST
#define FIRST real
#endif
#ifndef SECOND
#define SECOND real
#endif

DEVICE float gelu(float x) { return x * 0.5f * (1 + erff(x * 0.70710678f)); }

/* Operands and results; those an operation does not have cost nothing. */
struct Operands {
  const FIRST *x;
  const SECOND *y;
  const real *z, *w, *g, *h, *r;
  real *o, *p, *q;
};
template <int N>
struct Values {
  Pack<FIRST, N> x;
  Pack<SECOND, N> y;
  Pack<real, N> z, w;
};

template <int N>
DEVICE Values<N> values(const Operands &of, size_t at) {
  Values<N> v;
  v.x = read_once<N>(of.x + at);
  if (INPUTS > 1) v.y = read_once<N>(of.y + at);
  if (INPUTS > 2) v.z = read_once<N>(of.z + at);
  if (INPUTS > 3) v.w = read_once<N>(of.w + at);
  return v;
}

template <int N>
DEVICE void finish(const Operands &of, size_t at, const Values<N> &v, const Pack<real, N> &vg, const Pack<real, N> &vh,
                   float r) {
  Pack<real, N> vo, vp, vq;
#pragma unroll
  for (int k = 0; k < N; k++) {
    const float x = widened(v.x.at[k]), y = INPUTS > 1 ? widened(v.y.at[k]) : 0;
    const float z = INPUTS > 2 ? widened(v.z.at[k]) : 0, w = INPUTS > 3 ? widened(v.w.at[k]) : 0;
    const float g = VECTORS > 0 ? widened(vg.at[k]) : 0, h = VECTORS > 1 ? widened(vh.at[k]) : 0;
#if UNIT == 2
    const float x_before = widened(v.x.at[k & ~1]), y_before = widened(v.y.at[k & ~1]);
    const float x_after = widened(v.x.at[k | 1]), y_after = widened(v.y.at[k | 1]);
#endif
    float o = 0, p = 0, q = 0;
    EACH
    vo.at[k] = narrowed(o), vp.at[k] = narrowed(p), vq.at[k] = narrowed(q);
  }
  write<N>(of.o + at, vo);
  if (OUTPUTS > 1) write<N>(of.p + at, vp);
  if (OUTPUTS > 2) write<N>(of.q + at, vq);
}

#if !VECTORS && !ROW_NUMBERS
extern "C" __global__ void __launch_bounds__(THREADS)
    flat(const FIRST *x, const SECOND *y, const real *z, const real *w, real *o, real *p, real *q, long long count) {
  const Operands of = {x, y, z, w, 0, 0, 0, o, p, q};
  const long long vectors = count / VEC, step = (long long)gridDim.x * THREADS * ITEMS;
  const Pack<real, VEC> none = {};
  for (long long first = (long long)blockIdx.x * THREADS * ITEMS + threadIdx.x; first < vectors; first += step) {
    Values<VEC> v[ITEMS];
    if (first + (ITEMS - 1) * THREADS < vectors) { /* no test between loads: all in flight at once */
#pragma unroll
      for (int i = 0; i < ITEMS; i++) v[i] = values<VEC>(of, (first + i * THREADS) * VEC);
#pragma unroll
      for (int i = 0; i < ITEMS; i++) finish<VEC>(of, (first + i * THREADS) * VEC, v[i], none, none, 0);
    } else {
      for (long long vector = first; vector < vectors; vector += THREADS)
        finish<VEC>(of, vector * VEC, values<VEC>(of, vector * VEC), none, none, 0);
    }
  }
  if (VEC > UNIT && blockIdx.x == 0) { /* what no whole vector holds */
    const long long at = vectors * VEC + (long long)threadIdx.x * UNIT;
    const Pack<real, UNIT> nothing = {};
    if (at < count) finish<UNIT>(of, at, values<UNIT>(of, at), nothing, nothing, 0);
  }
}

#else
extern "C" __global__ void __launch_bounds__(THREADS)
    by_columns(const FIRST *x, const SECOND *y, const real *g, const real *h, const real *r, real *o, int rows,
               int columns, int period) {
#if HALVES
  const Operands of = {x, x + columns, 0, 0, g, h, r, o, o + columns, 0};
#else
  const Operands of = {x, y, 0, 0, g, h, r, o, 0, 0};
#endif
  const size_t pitch = (size_t)columns * (1 + HALVES);
  const int column = ((int)blockIdx.x * WIDE + (int)threadIdx.x % WIDE) * VEC, part = TALL * ITEMS;
  if (column >= columns) return;
  Pack<real, VEC> vg = {}, vh = {};
  if (VECTORS > 0 && !HALVES) vg = read<VEC>(g + column);
  if (VECTORS > 1 && !HALVES) vh = read<VEC>(h + column);
  (void)period;
  for (int first = (int)blockIdx.y * part + (int)threadIdx.x / WIDE; first < rows; first += (int)gridDim.y * part) {
    Values<VEC> v[ITEMS];
    float numbers[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int row = first + i * TALL;
      numbers[i] = 0;
      if (row < rows) {
        v[i] = values<VEC>(of, row * pitch + column);
        if (ROW_NUMBERS) numbers[i] = widened(r[row]);
      }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int row = first + i * TALL;
      if (row < rows) {
        if (HALVES) {
          const size_t at = (size_t)(row % period) * columns + column;
          vg = read<VEC>(g + at), vh = read<VEC>(h + at);
        }
        finish<VEC>(of, row * pitch + column, v[i], vg, vh, numbers[i]);
      }
    }
  }
}
#endif
