/* Kernels that reduce the columns of matrices: means, choices, and bags of a table's rows.
 *
 * Set from outside: OPERATION (below), DTYPE, VEC (columns a thread), WIDE (threads along a row), THREADS, ITEMS (rows a thread
 * has in flight), SPLITS (blocks that share a column), TAIL (who joins what they found: 0 a second launch, 1 the one that ends
 * last), LOAD. VEC divides the columns.
 *
 * A State is reduced over the rows of each matrix: SUM adds up TERM of x and the row's number r; LEAST is the smallest
 * value, NaN before all, and the first row where it stands. */
#include "gpu_task.cuh"
#include "gpu_total.cuh"

#ifndef OPERATION
#define OPERATION 0
#endif
#ifndef VEC
#define VEC 4
#endif
#ifndef WIDE
#define WIDE 32
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef ITEMS
#define ITEMS 4
#endif
#ifndef SPLITS
#define SPLITS 2
#endif
#ifndef TAIL
#define TAIL 0
#endif

#if OPERATION == 0 /* mean_columns */
#define TERM x
#define RESULT state.sum / rows
#elif OPERATION == 1 /* argmin_columns */
#define LEAST 1
#define OUT long long
#define RESULT state.index
#elif OPERATION == 2 /* embedding_bag_sum */
#define GATHER 1
#define TERM x
#define RESULT state.sum
#elif OPERATION == 3 /* embedding_bag_weighted */
#define GATHER 1
#define SHARES 1
#define TERM x * r
#define RESULT state.sum
#endif
#ifndef LEAST
#define LEAST 0
#endif
#ifndef GATHER
#define GATHER 0
#endif
#ifndef SHARES
#define SHARES 0
#endif
#ifndef OUT
#define OUT real
#endif
#define TALL (THREADS / WIDE)

#if LEAST
struct State {
  float value;
  int index;
};
DEVICE State none() { return State{__int_as_float(0x7F800000), 0x7FFFFFFF}; }
DEVICE State merged(const State &a, const State &b) {
  const bool same = a.value == b.value || (is_nan(a.value) && is_nan(b.value));
  const bool second = same ? b.index < a.index : b.value < a.value || is_nan(b.value);
  return second && !(is_nan(a.value) && !is_nan(b.value)) ? b : a;
}
DEVICE State of_element(float x, float, int row) { return State{x, row}; }
#else
struct State {
  float sum;
};
DEVICE State none() { return State{0}; }
DEVICE State merged(const State &a, const State &b) { return State{a.sum + b.sum}; }
DEVICE State of_element(float x, float r, int) {
  (void)r;
  return State{TERM};
}
#endif
DEVICE void put(long long &to, int x) { to = x; }
DEVICE void put(real &to, float x) { to = narrowed(x); }
DEVICE State seen(const State *other) { /* what another block wrote */
  State state;
#pragma unroll
  for (int i = 0; i < (int)(sizeof(State) / 4); i++) ((int *)&state)[i] = __ldcg((const int *)other + i);
  return state;
}

/* The result of a column from what every split found; a split's States lie `pitch` apart. */
DEVICE void join(const State *of_splits, long long pitch, OUT *out, int rows) {
  State state = none();
#pragma unroll 4
  for (int i = 0; i < SPLITS; i++) state = merged(state, seen(of_splits + i * pitch));
  (void)rows;
  put(*out, RESULT);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    by_columns(const real *x, const long long *numbers, const real *shares, OUT *out, State *of_splits, unsigned *ended,
               int rows, int columns) {
  __shared__ State found[THREADS * VEC];
  const int across = threadIdx.x % WIDE, down = threadIdx.x / WIDE, matrix = blockIdx.z;
  const int column = ((int)blockIdx.x * WIDE + across) * VEC, part = (rows + SPLITS - 1) / SPLITS;
  const int begin = (int)blockIdx.y * part, end = begin + part < rows ? begin + part : rows;
  State state[VEC];
#pragma unroll
  for (int k = 0; k < VEC; k++) state[k] = none();
  if (column < columns)
    for (int first = begin + down; first < end; first += TALL * ITEMS) {
      Pack<real, VEC> p[ITEMS];
      float r[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; i++) {
        const int row = first + i * TALL;
        r[i] = 0;
        if (row < end) {
          const size_t at = (size_t)matrix * rows + row;
          p[i] = read_once<VEC>(x + (GATHER ? (size_t)numbers[at] : at) * columns + column);
          if (SHARES) r[i] = widened(shares[at]);
        }
      }
#pragma unroll
      for (int i = 0; i < ITEMS; i++)
        if (first + i * TALL < end)
#pragma unroll
          for (int k = 0; k < VEC; k++)
            state[k] = merged(state[k], of_element(widened(p[i].at[k]), r[i], first + i * TALL));
    }
#pragma unroll
  for (int k = 0; k < VEC; k++) found[k * THREADS + threadIdx.x] = state[k];
#pragma unroll
  for (int half = TALL / 2; half > 0; half /= 2) {
    __syncthreads();
    if (down < half)
#pragma unroll
      for (int k = 0; k < VEC; k++) {
        State *const mine = found + k * THREADS + threadIdx.x;
        *mine = merged(*mine, mine[half * WIDE]);
      }
  }
  const size_t at = (size_t)matrix * columns + column;
  const long long pitch = (long long)gridDim.z * columns;
  (void)pitch;
  if (down == 0 && column < columns)
#pragma unroll
    for (int k = 0; k < VEC; k++) {
      const State state = found[k * THREADS + threadIdx.x];
      if (SPLITS == 1)
        put(out[at + k], RESULT);
      else
        of_splits[blockIdx.y * pitch + at + k] = state;
    }
#if SPLITS > 1 && TAIL
  if (last_block(ended + matrix * gridDim.x + blockIdx.x, SPLITS) && down == 0 && column < columns)
#pragma unroll
    for (int k = 0; k < VEC; k++) join(of_splits + at + k, pitch, out + at + k, rows);
#endif
}

extern "C" __global__ void __launch_bounds__(256) join_splits(const State *of_splits, OUT *out, int rows, int count) {
  const int at = (int)blockIdx.x * 256 + (int)threadIdx.x;
  if (at < count) join(of_splits + at, count, out + at, rows);
}
