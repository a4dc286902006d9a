/* Element-wise kernels: activations, gates, chains with vectors over columns or numbers a row, optimizer steps.
 *
 * Set from outside: OPERATION (below), DTYPE, VEC (elements a load), ITEMS (vectors a thread has in flight), THREADS, WIDE (of
 * them along a row), LOAD, STORE, QUICK. `flat` takes the tensors as one row; `by_columns`, where an operand is a vector over
 * columns or a number a row, gives each thread ITEMS rows of the same columns, so that it reads the vector once.
 *
 * An operation computes o (p, q) from x (y, z, w), all floats; g and h are of the columns, r of the row. */
#include "gpu_task.cuh"

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
