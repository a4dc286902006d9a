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

#include "gpu_ptx.cuh"

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
