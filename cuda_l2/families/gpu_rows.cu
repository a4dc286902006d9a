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
#include "gpu_task.cuh"
#include "gpu_total.cuh"

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

#include "gpu_rows_operations.cuh"
#include "gpu_rows_state.cuh"

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
