/* softmax(Q K^T / sqrt(depth) + bias) V in one pass over the keys, on tensor cores (mma.sync), types of 16 bits.
 *
 * Set from outside: OPERATION (below), DTYPE, DEPTH (a multiple of 16), WARPS (16 queries each), KEYS (of a tile, a multiple of
 * 16). Exponentials are the hardware's, to the base of 2.
 *
 * A warp keeps its queries, its sums and the running maximum and sum of every row in registers. Tiles of K and V come by
 * cp.async, the next while one is used. What a score gets beside the product is BIAS, of distance = query - key. */
#include "gpu_task.cuh"

#ifndef OPERATION
#define OPERATION 0
#endif
#ifndef DEPTH
#define DEPTH 64
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef KEYS
#define KEYS 64
#endif

#if OPERATION == 0 /* attention: every key */
#define BIAS score
#elif OPERATION == 1 /* causal */
#define CAUSAL 1
#define BIAS distance < 0 ? NOTHING : score
#elif OPERATION == 2 /* the last 8 keys */
#define CAUSAL 1
#define WINDOW 8
#define BIAS distance < 0 || distance >= WINDOW ? NOTHING : score
#elif OPERATION == 3 /* causal, less the head's slope times the distance */
#define CAUSAL 1
#define EXTRA real
#define BIAS distance < 0 ? NOTHING : score - slope * (float)distance
#elif OPERATION == 4 /* keys that a mask keeps, -10000 for the others */
#define EXTRA unsigned char
#define MASKED 1
#define BIAS keep ? score : score - 1e4f * LOG2_E
#endif
#ifndef CAUSAL
#define CAUSAL 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef EXTRA
#define EXTRA real
#endif
#ifndef MASKED
#define MASKED 0
#endif
#define LOG2_E 1.44269504f
#define NOTHING __int_as_float(0xFF800000)
#define QUERIES (16 * WARPS)
#define THREADS (32 * WARPS)
#define PITCH (DEPTH + 8) /* elements; rows begin in other banks */

typedef Pack<real, 2> Pair;
DEVICE unsigned paired(float x, float y) {
  const Pair pair = {{narrowed(x), narrowed(y)}};
  return *(const unsigned *)pair.at;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attend(const real *q, const real *k, const real *v, const EXTRA *extra, real *out, int heads, int sharing, int queries,
           int length) {
  DYNAMIC_SHARED(dynamic);
  real *const tiles = (real *)dynamic; /* K, V, and both again */
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, pair = lane % 4 * 2;
  const int head = blockIdx.y, block = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x; /* the longest first */
  const size_t matrix = (size_t)blockIdx.z * heads + head, shared = (size_t)blockIdx.z * (heads / sharing) + head / sharing;
  const int first_row = block * QUERIES + warp * 16 + group;
  const real *of_k = k + shared * length * DEPTH, *of_v = v + shared * length * DEPTH;
  const float scale = LOG2_E * rsqrtf((float)DEPTH);
#if OPERATION == 3
  const float slope = widened(extra[head]) * LOG2_E;
#endif

  const auto fetch = [&](int tile, int key) {
    real *const to = tiles + tile * 2 * KEYS * PITCH;
#pragma unroll
    for (int i = threadIdx.x; i < KEYS * (DEPTH / 8); i += THREADS) {
      const int row = i / (DEPTH / 8), column = i % (DEPTH / 8) * 8;
      const bool some = key + row < length;
      const size_t from = some ? (size_t)(key + row) * DEPTH + column : 0;
      copy_or_zero(to + row * PITCH + column, of_k + from, some);
      copy_or_zero(to + (KEYS + row) * PITCH + column, of_v + from, some);
    }
  };

  unsigned of_q[DEPTH / 16][4];
#pragma unroll
  for (int d = 0; d < DEPTH / 16; d++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = first_row + i % 2 * 8, column = d * 16 + i / 2 * 8 + pair;
      of_q[d][i] = row < queries ? *(const unsigned *)(q + (matrix * queries + row) * DEPTH + column) : 0;
    }
  float sums[DEPTH / 8][4], most[2] = {LOWEST, LOWEST}, total[2] = {0, 0};
#pragma unroll
  for (int d = 0; d < DEPTH / 8; d++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[d][i] = 0;

  const int last_row = block * QUERIES + QUERIES - 1, end = CAUSAL && last_row + 1 < length ? last_row + 1 : length;
  const int begin = WINDOW && block * QUERIES >= WINDOW ? (block * QUERIES - WINDOW + 1) / KEYS * KEYS : 0;
  fetch(0, begin);
  int tile = 0;
  for (int key = begin; key < end; key += KEYS, tile ^= 1) {
    copied();
    __syncthreads(); /* this tile is here, and nobody reads the other one any more */
    if (key + KEYS < end) fetch(tile ^ 1, key + KEYS);
    const real *const of_tile = tiles + tile * 2 * KEYS * PITCH;

    float scores[KEYS / 8][4];
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) scores[n][i] = 0;
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++)
#pragma unroll
      for (int d = 0; d < DEPTH / 16; d++) {
        unsigned b[4];
        load_matrices(b, of_tile + (n * 16 + lane / 16 * 8 + lane % 8) * PITCH + d * 16 + lane / 8 % 2 * 8);
        multiply(scores[2 * n], of_q[d], b[0], b[1]);
        multiply(scores[2 * n + 1], of_q[d], b[2], b[3]);
      }

    const bool edge = OPERATION > 1 || key + KEYS > length || (CAUSAL && key + KEYS > block * QUERIES + 1);
    float now[2] = {most[0], most[1]};
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float score = scores[n][i] * scale;
        if (edge) {
          const int column = key + n * 8 + pair + i % 2, distance = first_row + i / 2 * 8 - column;
          (void)distance;
#if MASKED
          const bool keep = column < length && extra[(size_t)blockIdx.z * length + column];
#endif
          score = BIAS;
          if (column >= length) score = NOTHING;
        }
        scores[n][i] = score;
        now[i / 2] = fmaxf(now[i / 2], score); /* a NaN shows in the total */
      }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      now[half] = fmaxf(now[half], __shfl_xor_sync(~0u, now[half], 1));
      now[half] = fmaxf(now[half], __shfl_xor_sync(~0u, now[half], 2));
      const float share = quick_exp2(most[half] - now[half]);
      most[half] = now[half], total[half] *= share;
#pragma unroll
      for (int d = 0; d < DEPTH / 8; d++) sums[d][2 * half] *= share, sums[d][2 * half + 1] *= share;
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        scores[n][i] = quick_exp2(scores[n][i] - most[i / 2]);
        total[i / 2] += scores[n][i];
      }
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
      const unsigned a[4] = {paired(scores[2 * n][0], scores[2 * n][1]), paired(scores[2 * n][2], scores[2 * n][3]),
                             paired(scores[2 * n + 1][0], scores[2 * n + 1][1]),
                             paired(scores[2 * n + 1][2], scores[2 * n + 1][3])};
#pragma unroll
      for (int d = 0; d < DEPTH / 16; d++) {
        unsigned b[4];
        load_transposed(b, of_tile + (KEYS + n * 16 + lane % 16) * PITCH + d * 16 + lane / 16 * 8);
        multiply(sums[2 * d], a, b[0], b[1]);
        multiply(sums[2 * d + 1], a, b[2], b[3]);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    total[half] += __shfl_xor_sync(~0u, total[half], 1);
    total[half] += __shfl_xor_sync(~0u, total[half], 2);
    const int row = first_row + 8 * half;
    const float inverse = 1 / total[half];
    if (row < queries)
#pragma unroll
      for (int d = 0; d < DEPTH / 8; d++)
        *(unsigned *)(out + (matrix * queries + row) * DEPTH + d * 8 + pair) =
            paired(sums[d][2 * half] * inverse, sums[d][2 * half + 1] * inverse);
  }
}
