#pragma once
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
