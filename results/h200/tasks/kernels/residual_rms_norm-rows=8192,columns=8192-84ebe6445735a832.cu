/* cuda-l2
target = "cuda"
arch = "sm_80"
[names]
whole_vectors = "0 - (columns) % 4"
row_fits = "8192 - columns"

[[buffer]]
name = "x"
shape = ["rows", "columns"]
dtype = "float32"
kind = "input"

[[buffer]]
name = "residual"
shape = ["rows", "columns"]
dtype = "float32"
kind = "input"

[[buffer]]
name = "gain"
shape = ["columns"]
dtype = "float32"
kind = "weight"

[[buffer]]
name = "sum"
shape = ["rows", "columns"]
dtype = "float32"
kind = "output"

[[buffer]]
name = "out"
shape = ["rows", "columns"]
dtype = "float32"
kind = "output"

[[launch]]
kernel = "by_rows"
grid = ["cdiv(rows, 1) * 1"]
block = [512]
args = ["x", "residual", "x", "gain", "x", "x", "sum", "out", "x", "x", "x", "x", {int32 = "rows"}, {int32 = "columns"}, {int32 = "1"}, {int32 = "1"}]
*/
#define OPERATION 5
#define DTYPE 32
#define VEC 4
#define LANES 512
#define CLUSTER 1
#define KEEP 1
#define ITEMS 4
#define ROWS 1
#define TAIL 0
#define LOAD 1
#define STORE 1
#define QUICK 0

/* Kernels that reduce each row of a matrix, and most of them map it afterwards: softmaxes, norms, losses, choices.
 *
 * Set from outside: OPERATION (gpu_rows_operations.cuh), DTYPE, VEC (elements a load), LANES (threads a row in a block),
 * ROWS (rows a block), CLUSTER (blocks a row), KEEP (where a row stays between its two readings: 0 nowhere, 1 registers, 2
 * shared memory), ITEMS (vectors a thread loads at once; with KEEP 1 all it ever loads), TAIL (who adds up the rows'
 * numbers: 0 a second launch, 1 the block that ends last), LOAD, STORE, QUICK. VEC divides the columns.
 *
 * An operation reduces a State over x (y, z: more matrices; g, h: vectors over the columns; r: a number of the row):
 * LOG_SUM, a largest element m and the sum s of e^(x - m), with a plain sum t; MOMENTS, n elements, their mean and the
 * sum of squares around it; SUMS, sums of S, T, U; BEST, the largest value and the first index where it stands; COPY,
 * nothing. Then either ROW, a number a row, and TOTAL if these are added up, or EACH, which sets o (p) from the State and
 * SETUP's scalars. */
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
#ifndef LANES
#define LANES 32
#endif
#ifndef ROWS
#define ROWS 4
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#ifndef KEEP
#define KEEP 0
#endif
#ifndef ITEMS
#define ITEMS 4
#endif
#ifndef TAIL
#define TAIL 0
#endif

/* What gpu_rows.cu computes, by OPERATION; the words are explained there. */
#define LOG_SUM 1
#define MOMENTS 2
#define SUMS 3
#define BEST 4
#define COPY 5

#if OPERATION == 0 /* softmax */
#define KIND LOG_SUM
#define SETUP const float scale = 1 / state.s;
#define EACH o = exponential(x - state.m) * scale;
#elif OPERATION == 1 /* log_softmax */
#define KIND LOG_SUM
#define SETUP const float log_s = logf(state.s);
#define EACH o = x - state.m - log_s;
#elif OPERATION == 2 /* logsumexp */
#define KIND LOG_SUM
#define INFINITE 1
#define ROW state.m + logf(state.s)
#elif OPERATION == 3 /* layer_norm */
#define KIND MOMENTS
#define VECTORS 2
#define SETUP const float scale = rsqrtf(state.squares / columns + 1e-5f);
#define EACH o = (x - state.mean) * scale * g + h;
#elif OPERATION == 4 /* rms_norm */
#define KIND SUMS
#define VECTORS 1
#define S x * x
#define SETUP const float scale = rsqrtf(state.s / columns + 1e-6f);
#define EACH o = x * scale * g;
#elif OPERATION == 5 /* residual_rms_norm */
#define KIND SUMS
#define MATRICES 2
#define VECTORS 1
#define OUTPUTS 2
#define S (x + y) * (x + y)
#define SETUP const float scale = rsqrtf(state.s / columns + 1e-6f);
#define EACH o = x + y, p = (x + y) * scale * g;
#elif OPERATION == 6 /* normalise_rows */
#define KIND SUMS
#define S x * x
#define SETUP const float scale = 1 / larger(sqrtf(state.s), 1e-12f);
#define EACH o = x * scale;
#elif OPERATION == 7 /* sum_rows */
#define KIND SUMS
#define S x
#define ROW state.s
#elif OPERATION == 8 /* variance_rows */
#define KIND MOMENTS
#define ROW state.squares / (columns - 1)
#elif OPERATION == 9 /* l2_norm_rows */
#define KIND SUMS
#define S x * x
#define ROW sqrtf(state.s)
#elif OPERATION == 10 /* max_rows */
#define KIND BEST
#define ROW state.value
#define INDEX 2
#elif OPERATION == 11 /* count_positive: sums of ones are exact in fp32 up to 2^24 */
#define KIND SUMS
#define S (x > 0 ? 1.0f : 0.0f)
#define ROW state.s
#define ROW_TYPE long long
#elif OPERATION == 12 /* temperature_softmax */
#define KIND LOG_SUM
#define FACTOR 1
#define BEFORE x = x / r;
#define SETUP const float scale = 1 / state.s;
#define EACH o = exponential(x - state.m) * scale;
#elif OPERATION == 13 /* greedy_token */
#define KIND BEST
#define INDEX 1
#elif OPERATION == 14 /* gumbel_sampling */
#define KIND BEST
#define MATRICES 2
#define BEFORE x = x - logf(-logf(clipped(y, 1e-6f, (float)(1 - 1e-6))));
#define INDEX 1
#elif OPERATION == 15 /* min_p_filter */
#define KIND BEST
#define SETUP const float limit = state.value - 2.99573227f;
#define EACH o = x < limit ? -INFINITY_ : x;
#elif OPERATION == 16 /* cross_entropy */
#define KIND LOG_SUM
#define LABEL 1
#define CHOSEN 1
#define ROW state.m - chosen + logf(state.s)
#define TOTAL total / rows
#elif OPERATION == 17 /* cross_entropy_smoothed */
#define KIND LOG_SUM
#define LABEL 1
#define CHOSEN 1
#define PLAIN_SUM 1
#define ROW logf(state.s) - 0.9f * (chosen - state.m) - 0.1f * (state.t / columns - state.m)
#elif OPERATION == 18 /* cross_entropy_gradient */
#define KIND LOG_SUM
#define LABEL 1
#define SETUP const float scale = 1 / (state.s * rows), one = 1.0f / rows;
#define EACH o = exponential(x - state.m) * scale - (column + k == label ? one : 0);
#elif OPERATION == 19 /* kl_divergence of logarithms */
#define KIND SUMS
#define MATRICES 2
#define S exponential(y) * (y - x)
#define ROW state.s
#define TOTAL total / rows
#elif OPERATION == 20 /* cosine_distance: the similarity rounds to the task's type before it is taken from one */
#define KIND SUMS
#define MATRICES 2
#define S x * y
#define T x * x
#define U y * y
#define ROW 1 - widened(narrowed(state.s / (larger(sqrtf(state.t), 1e-8f) * larger(sqrtf(state.u), 1e-8f))))
#elif OPERATION == 21 /* gaussian_likelihood: z variance */
#define KIND SUMS
#define MATRICES 3
#define S logf(z) + (x - y) * (x - y) / z
#define ROW 0.5f * (state.s / columns + 1.83787707f)
#elif OPERATION == 22 /* triplet_margin: x anchor, y positive, z negative */
#define KIND SUMS
#define MATRICES 3
#define S (x - y + 1e-6f) * (x - y + 1e-6f)
#define T (x - z + 1e-6f) * (x - z + 1e-6f)
#define ROW larger(sqrtf(state.s) - sqrtf(state.t) + 1, 0)
#define TOTAL total / rows
#elif OPERATION == 23 /* dice */
#define KIND SUMS
#define MATRICES 2
#define SECOND unsigned char
#define BEFORE x = quotient(1, 1 + exponential(-x));
#define S x * y
#define T x + y
#define ROW 1 - (2 * state.s + 1) / (state.t + 1)
#elif OPERATION == 24 /* clip_gradient_adaptive: x parameter, y gradient */
#define KIND SUMS
#define MATRICES 2
#define S x * x
#define T y * y
#define SETUP const float scale = smaller(0.01f * larger(sqrtf(state.s), 1e-3f) / larger(sqrtf(state.t), 1e-6f), 1);
#define EACH o = y * scale;
#elif OPERATION == 25 /* quantise_int8 */
#define KIND SUMS
#define OUT signed char
#define LARGEST 1
#define S fabsf(x)
#define SETUP const float scale = larger(state.s, 1e-6f) / 127;
#define EACH o = clipped(rintf(x / scale), -127, 127);
#define ROW scale
#elif OPERATION == 26 /* instance_norm: a row is one channel of one image */
#define KIND MOMENTS
#define SETUP const float scale = rsqrtf(state.squares / columns + 1e-5f);
#define EACH o = (x - state.mean) * scale;
#elif OPERATION == 27 /* global_average_pool */
#define KIND SUMS
#define S x
#define ROW state.s / columns
#elif OPERATION == 28 /* matvec */
#define KIND SUMS
#define VECTORS 1
#define VECTORS_FIRST 1
#define S x * g
#define ROW state.s
#elif OPERATION == 29 /* embedding_position_norm: rows of a table by number, y positions that repeat */
#define KIND MOMENTS
#define MATRICES 2
#define LABEL 1
#define GATHER 1
#define VECTORS 2
#define BEFORE x = x + y;
#define SETUP const float scale = rsqrtf(state.squares / columns + 1e-5f);
#define EACH o = (x - state.mean) * scale * g + h;
#elif OPERATION == 30 /* embedding_similarity: y the query of the row's bag */
#define KIND SUMS
#define MATRICES 2
#define LABEL 1
#define GATHER 2
#define S x * y
#define ROW state.s
#elif OPERATION == 31 /* embedding: rows of a table by number */
#define KIND COPY
#define LABEL 1
#define GATHER 1
#define EACH o = x;
#elif OPERATION == 32 /* group_norm: a row is a group of one image, gain and shift are of its planes */
#define KIND MOMENTS
#define VECTORS 2
#define OF_PLANES 1
#define SETUP const float scale = rsqrtf(state.squares / columns + 1e-5f);
#define EACH o = (x - state.mean) * scale * g + h;
#endif

#ifndef MATRICES
#define MATRICES 1
#endif
#ifndef VECTORS
#define VECTORS 0
#endif
#ifndef VECTORS_FIRST
#define VECTORS_FIRST 0
#endif
#ifndef OUTPUTS
#define OUTPUTS 1
#endif
#ifndef SECOND
#define SECOND real
#endif
#ifndef OUT
#define OUT real
#endif
#ifndef OF_PLANES
#define OF_PLANES 0
#endif
#ifndef LABEL
#define LABEL 0
#endif
#ifndef FACTOR
#define FACTOR 0
#endif
#ifndef CHOSEN
#define CHOSEN 0
#endif
#ifndef GATHER
#define GATHER 0
#endif
#ifndef BEFORE
#define BEFORE
#endif
#ifndef SETUP
#define SETUP
#endif
#ifndef INFINITE
#define INFINITE 0
#endif
#ifndef PLAIN_SUM
#define PLAIN_SUM 0
#endif
#ifndef LARGEST
#define LARGEST 0
#endif
#ifndef INDEX
#define INDEX 0
#endif
#if defined(TOTAL)
#define ROW_TYPE float
#elif !defined(ROW_TYPE)
#define ROW_TYPE real
#endif
/* What gpu_rows.cu reduces a row to, by KIND: a State of nothing, of two States, of more elements, of a whole row. */
#define INFINITY_ __int_as_float(0x7F800000)
#define THREADS (LANES * ROWS)
#define WARPS (LANES / 32)
#define STRIDE (LANES * CLUSTER)

/* Of two, NaN where one is. */
DEVICE float larger(float x, float y) { return x > y || is_nan(x) ? x : y; }
DEVICE float smaller(float x, float y) { return x < y || is_nan(x) ? x : y; }
DEVICE void put(long long &to, float x) { to = (long long)x; }
DEVICE void put(signed char &to, float x) { to = (signed char)(int)x; }
DEVICE void put(real &to, float x) { to = narrowed(x); }
#if DTYPE != 32
DEVICE void put(float &to, float x) { to = x; }
#endif

/* What VEC elements of every operand are, as floats. */
struct Elements {
  float x[VEC], y[VEC], z[VEC], g[VEC], h[VEC];
};

#if KIND == LOG_SUM
struct State {
  float m, s;
#if PLAIN_SUM
  float t;
#endif
};
DEVICE State none() { return State{LOWEST, 0}; }
DEVICE State merged(const State &a, const State &b) {
  State c = none();
  c.m = fmaxf(a.m, b.m); /* a NaN shows in s */
  c.s = a.s * exponential(a.m - c.m) + b.s * exponential(b.m - c.m);
#if PLAIN_SUM
  c.t = a.t + b.t;
#endif
  return c;
}
DEVICE void take(State &state, const Elements &e, int) {
  float most = state.m;
#pragma unroll
  for (int k = 0; k < VEC; k++) most = fmaxf(most, e.x[k]);
  if (INFINITE) most = fminf(most, -(LOWEST)); /* e^(inf - m) is inf, and not NaN */
  float sum = state.s * exponential(state.m - most);
#pragma unroll
  for (int k = 0; k < VEC; k++) {
    sum += exponential(e.x[k] - most);
#if PLAIN_SUM
    state.t += e.x[k];
#endif
  }
  state.m = most, state.s = sum;
}
#elif KIND == MOMENTS
struct State {
  float n, mean, squares;
};
DEVICE State none() { return State{0, 0, 0}; }
DEVICE State merged(const State &a, const State &b) {
  const float n = a.n + b.n, share = n > 0 ? b.n / n : 0, difference = b.mean - a.mean;
  return State{n, a.mean + difference * share, a.squares + b.squares + difference * difference * a.n * share};
}
DEVICE void take(State &state, const Elements &e, int) {
  float sum = 0, squares = 0;
#pragma unroll
  for (int k = 0; k < VEC; k++) sum += e.x[k];
  const float mean = sum * (1.0f / VEC);
#pragma unroll
  for (int k = 0; k < VEC; k++) squares += (e.x[k] - mean) * (e.x[k] - mean);
  state = merged(state, State{VEC, mean, squares});
}
#elif KIND == SUMS
struct State {
  float s;
#ifdef T
  float t;
#endif
#ifdef U
  float u;
#endif
};
DEVICE State none() { return State{0}; }
DEVICE State merged(State a, const State &b) {
  a.s = LARGEST ? larger(a.s, b.s) : a.s + b.s;
#ifdef T
  a.t += b.t;
#endif
#ifdef U
  a.u += b.u;
#endif
  return a;
}
DEVICE void take(State &state, const Elements &e, int) {
  State sum = none();
#pragma unroll
  for (int k = 0; k < VEC; k++) {
    const float x = e.x[k], y = e.y[k], z = e.z[k], g = e.g[k];
    (void)x, (void)y, (void)z, (void)g;
    const float s = S;
    sum.s = LARGEST ? larger(sum.s, s) : sum.s + s;
#ifdef T
    sum.t += T;
#endif
#ifdef U
    sum.u += U;
#endif
  }
  state = merged(state, sum);
}
#elif KIND == BEST
struct State {
  float value;
  int index;
};
DEVICE State none() { return State{-INFINITY_, 0x7FFFFFFF}; }
DEVICE State merged(const State &a, const State &b) {
  const bool same = a.value == b.value || (is_nan(a.value) && is_nan(b.value));
  const bool second = same ? b.index < a.index : b.value > a.value || is_nan(b.value);
  return second && !(is_nan(a.value) && !is_nan(b.value)) ? b : a;
}
DEVICE void take(State &state, const Elements &e, int column) {
  float most = e.x[0];
#pragma unroll
  for (int k = 1; k < VEC; k++) most = larger(most, e.x[k]);
  if (most > state.value || (is_nan(most) && !is_nan(state.value))) { /* rare: a thread's first ones aside */
    state.value = most;
#pragma unroll
    for (int k = VEC - 1; k >= 0; k--)
      if (e.x[k] == most || (is_nan(most) && is_nan(e.x[k]))) state.index = column + k;
  }
}
#endif

#if KIND == COPY
struct State {};
DEVICE State none() { return State(); }
DEVICE void take(State &, const Elements &, int) {}
DEVICE State across(State state) { return state; }
#else
DEVICE State of_lane(State state, int mask) {
  int words[sizeof(State) / 4];
#pragma unroll
  for (int i = 0; i < (int)(sizeof(State) / 4); i++) words[i] = __shfl_xor_sync(~0u, ((int *)&state)[i], mask);
#pragma unroll
  for (int i = 0; i < (int)(sizeof(State) / 4); i++) ((int *)&state)[i] = words[i];
  return state;
}

/* Of the whole row, in every thread of it. All threads of the block, and of the cluster, come here once. */
DEVICE State across(State state) {
#pragma unroll
  for (int mask = (LANES < 32 ? LANES : 32) / 2; mask > 0; mask /= 2) state = merged(state, of_lane(state, mask));
#if LANES > 32
  __shared__ State of_warps[ROWS][WARPS];
  const int row = threadIdx.x / LANES, warp = threadIdx.x % LANES / 32;
  if (threadIdx.x % 32 == 0) of_warps[row][warp] = state;
  __syncthreads();
  state = of_warps[row][threadIdx.x % WARPS];
#pragma unroll
  for (int mask = WARPS / 2; mask > 0; mask /= 2) state = merged(state, of_lane(state, mask));
#endif
#if CLUSTER > 1
  __shared__ State of_blocks[CLUSTER];
  cluster_wait(); /* the others have begun: arrived at the kernel's start */
  if (threadIdx.x < CLUSTER)
    for (int i = 0; i < (int)(sizeof(State) / 4); i++)
      cluster_store((int *)&of_blocks[cluster_rank()] + i, threadIdx.x, ((unsigned *)&state)[i]);
  __syncwarp();
  cluster_arrive();
  cluster_wait();
  state = of_blocks[0];
#pragma unroll
  for (int i = 1; i < CLUSTER; i++) state = merged(state, of_blocks[i]);
#endif
  return state;
}

#endif

#if LABEL
typedef long long Number;
#else
typedef real Number;
#endif
struct Packs {
  Pack<real, VEC> x;
  Pack<SECOND, VEC> y;
  Pack<real, VEC> z;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    by_rows(const real *x, const SECOND *y, const real *z, const real *g, const real *h, const Number *numbers, OUT *out,
            real *more, ROW_TYPE *of_rows, long long *indices, unsigned *ended, real *result, int rows, int columns,
            int period, int plane) {
#if CLUSTER > 1
  cluster_arrive();
  const int lane = threadIdx.x + LANES * cluster_rank();
#else
  const int lane = threadIdx.x % LANES;
#endif
  const int row = (int)(blockIdx.x / CLUSTER) * ROWS + (int)(threadIdx.x / LANES);
  const int here = row < rows ? row : rows - 1; /* threads beyond the last row do its work too, and store nothing */
  const int vectors = columns / VEC;
#if LABEL
  const long long label = numbers[here];
#elif FACTOR
  const float r = widened(numbers[here]);
#endif
#if GATHER
  const real *px = x + (size_t)label * columns;
  const SECOND *py = y + (size_t)(GATHER == 1 ? here % period : here / period) * columns;
#else
  const real *px = x + (size_t)here * columns;
  const SECOND *py = y + (size_t)here * columns;
#endif
  const real *pz = z + (size_t)here * columns;
#if CHOSEN
  const float chosen = widened(px[label]);
#endif
  (void)pz, (void)py, (void)plane;

  /* A vector's elements as the operation sees them. */
  const auto elements = [&](const Packs &p, const Pack<real, VEC> &vg, const Pack<real, VEC> &vh) {
    Elements e;
#pragma unroll
    for (int k = 0; k < VEC; k++) {
      float x = widened(p.x.at[k]);
      const float y = MATRICES > 1 ? widened(p.y.at[k]) : 0, z = MATRICES > 2 ? widened(p.z.at[k]) : 0;
      (void)y, (void)z;
      BEFORE
      e.x[k] = x, e.y[k] = y, e.z[k] = z;
      e.g[k] = VECTORS > 0 ? widened(vg.at[k]) : 0, e.h[k] = VECTORS > 1 ? widened(vh.at[k]) : 0;
    }
    return e;
  };
  const auto packs = [&](int vector, auto read_x) {
    Packs p;
    p.x = read_x(px + (size_t)vector * VEC);
    if (MATRICES > 1) p.y = read_once<VEC>(py + (size_t)vector * VEC);
    if (MATRICES > 2) p.z = read_once<VEC>(pz + (size_t)vector * VEC);
    return p;
  };
  const auto once = [](const real *p) { return read_once<VEC>(p); };
#ifdef EACH
  const auto first_time = [](const real *p) { return read<VEC>(p); };
#else
  const auto first_time = once;
#endif
  (void)once, (void)first_time;

  State state = none();
  const Pack<real, VEC> nothing = {};
  const auto take_one = [&](const Packs &p, int vector) {
    take(state, elements(p, VECTORS_FIRST ? read<VEC>(g + vector * VEC) : nothing, nothing), vector * VEC);
  };

#if KEEP == 1
  Packs kept[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++)
    if (lane + i * STRIDE < vectors) kept[i] = packs(lane + i * STRIDE, once);
#pragma unroll
  for (int i = 0; i < ITEMS; i++)
    if (lane + i * STRIDE < vectors) take_one(kept[i], lane + i * STRIDE);
#elif KEEP == 2
  DYNAMIC_SHARED(dynamic);
  typedef Pack<real, VEC> Kept; /* each thread reads what it copied itself: no thread waits for another */
  Kept *const kept = (Kept *)dynamic + threadIdx.x;
  for (int i = 0, vector = lane; vector < vectors; i += MATRICES, vector += STRIDE) {
    copy<sizeof(Kept)>(kept + i * THREADS, px + (size_t)vector * VEC);
    if (MATRICES > 1) copy<sizeof(Kept)>(kept + (i + 1) * THREADS, py + (size_t)vector * VEC);
  }
  copied();
  const auto of_shared = [&](int i) {
    Packs p;
    p.x = kept[i * THREADS];
    if (MATRICES > 1) p.y = kept[(i + 1) * THREADS];
    return p;
  };
#pragma unroll ITEMS
  for (int i = 0, vector = lane; vector < vectors; i += MATRICES, vector += STRIDE) take_one(of_shared(i), vector);
#else
  for (int first = lane; first < vectors; first += STRIDE * ITEMS) {
    Packs p[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * STRIDE < vectors) p[i] = packs(first + i * STRIDE, first_time);
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * STRIDE < vectors) take_one(p[i], first + i * STRIDE);
  }
#endif

  state = across(state);
  SETUP
#ifdef EACH
  const auto finish = [&](const Packs &packs, int vector) {
    const int column = vector * VEC;
    Pack<real, VEC> vg = nothing, vh = nothing;
#if OF_PLANES
    const int channel = here % period * (columns / plane) + column / plane;
    const real gain = __ldg(g + channel), shift = __ldg(h + channel);
#pragma unroll
    for (int k = 0; k < VEC; k++) vg.at[k] = gain, vh.at[k] = shift;
#else
    if (VECTORS > 0) vg = read<VEC>(g + column);
    if (VECTORS > 1) vh = read<VEC>(h + column);
#endif
    const Elements e = elements(packs, vg, vh);
    Pack<OUT, VEC> vo;
    Pack<real, VEC> vp;
#pragma unroll
    for (int k = 0; k < VEC; k++) {
      const float x = e.x[k], y = e.y[k], g = e.g[k], h = e.h[k];
      float o = 0, p = 0;
      (void)x, (void)y, (void)g, (void)h;
      EACH
      put(vo.at[k], o), put(vp.at[k], p);
    }
    if (row < rows) {
      write<VEC>(out + (size_t)row * columns + column, vo);
      if (OUTPUTS > 1) write<VEC>(more + (size_t)row * columns + column, vp);
    }
  };
#if KEEP == 1
#pragma unroll
  for (int i = 0; i < ITEMS; i++)
    if (lane + i * STRIDE < vectors) finish(kept[i], lane + i * STRIDE);
#elif KEEP == 2
#pragma unroll ITEMS
  for (int i = 0, vector = lane; vector < vectors; i += MATRICES, vector += STRIDE) finish(of_shared(i), vector);
#else
  for (int first = lane; first < vectors; first += STRIDE * ITEMS) {
    Packs p[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * STRIDE < vectors) p[i] = packs(first + i * STRIDE, once);
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
      if (first + i * STRIDE < vectors) finish(p[i], first + i * STRIDE);
  }
#endif
#endif

  if (lane == 0 && row < rows) {
#ifdef ROW
    put(of_rows[row], ROW);
#endif
#if INDEX
    indices[row] = state.index == 0x7FFFFFFF ? 0 : state.index; /* nothing but -inf: the first */
#endif
  }
#if defined(TOTAL) && TAIL
  if (last_block(ended)) {
    const float total = sum_of(of_rows, rows);
    if (threadIdx.x == 0) *result = narrowed(TOTAL);
  }
#endif
}

#ifdef TOTAL
extern "C" __global__ void __launch_bounds__(1024) add_up(const float *of_rows, real *result, int rows) {
  const float total = sum_of(of_rows, rows);
  if (threadIdx.x == 0) *result = narrowed(TOTAL);
}
#endif
