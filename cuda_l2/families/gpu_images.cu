/* Windows over planes, each by itself: pooling, depthwise convolutions.
 *
 * Set from outside: OPERATION (below), DTYPE, VEC (elements a load; divides the width), WIDE (outputs of a block along a row, a
 * thread each), TALL (threads down), DOWN (outputs below one another a thread computes), LOAD, STORE, QUICK.
 *
 * A block brings the inputs of its tile to shared memory as floats, with what lies outside filled in; a thread walks down its
 * column and reads every row of the window once for all outputs that need it. */
#include "gpu_task.cuh"

#ifndef OPERATION
#define OPERATION 0
#endif
#ifndef VEC
#define VEC 1
#endif
#ifndef WIDE
#define WIDE 32
#endif
#ifndef TALL
#define TALL 4
#endif
#ifndef DOWN
#define DOWN 4
#endif

#if OPERATION == 0 /* max_pool2d of 3, stride 2, padded by 1 */
#define WINDOW_H 3
#define WINDOW_W 3
#define STRIDE 2
#define PAD_H 1
#define PAD_W 1
#define OUTSIDE __int_as_float(0xFF800000)
#define TAKE(sum, x, w) sum = x > sum || is_nan(x) ? x : sum;
#define RESULT(sum) sum
#elif OPERATION == 1 /* average_pool2d of 2 */
#define WINDOW_H 2
#define WINDOW_W 2
#define STRIDE 2
#define PAD_H 0
#define PAD_W 0
#define RESULT(sum) sum * 0.25f
#elif OPERATION == 2 /* conv2d_depthwise of 5, padded by 2 */
#define WINDOW_H 5
#define WINDOW_W 5
#define STRIDE 1
#define PAD_H 2
#define PAD_W 2
#define WEIGHTS 1
#define RESULT(sum) sum
#elif OPERATION == 3 /* causal_depthwise_conv1d of 4, then silu: a plane's rows are the channels of one sequence */
#define WINDOW_H 1
#define WINDOW_W 4
#define STRIDE 1
#define PAD_H 0
#define PAD_W 3
#define WEIGHTS 2
#define RESULT(sum) quotient(sum, 1 + exponential(-sum))
#endif
#ifndef WEIGHTS
#define WEIGHTS 0 /* 1: a window of them a plane, 2: a row */
#endif
#ifndef OUTSIDE
#define OUTSIDE 0.0f
#endif
#if WEIGHTS
#define TAKE(sum, x, w) sum += x * w;
#elif !defined(TAKE)
#define TAKE(sum, x, w) sum += x;
#endif
#define THREADS (WIDE * TALL)
#define ROUNDED(n) (((n) + VEC - 1) / VEC * VEC)
#define LEFT ROUNDED(PAD_W)
#define RIGHT ROUNDED(WINDOW_W - STRIDE - PAD_W > 0 ? WINDOW_W - STRIDE - PAD_W : 0)
#define HEIGHT ((TALL * DOWN - 1) * STRIDE + WINDOW_H)
#define WIDTH (WIDE * STRIDE + LEFT + RIGHT)
#define ROW_VECTORS (WIDTH / VEC)
#define VECTORS (HEIGHT * ROW_VECTORS)
#define IN_FLIGHT (VECTORS > 7 * THREADS ? 8 : (VECTORS + THREADS - 1) / THREADS)

extern "C" __global__ void __launch_bounds__(THREADS)
    windows(const real *x, const real *weights, real *out, int height, int width, int out_height, int out_width,
            int channels) {
  __shared__ float tile[HEIGHT][WIDTH];
  const size_t plane = blockIdx.x;
  const int tile_row = (int)blockIdx.y * TALL * DOWN, tile_column = (int)blockIdx.z * WIDE;
  const real *of_plane = x + plane * height * width;
  const int top = tile_row * STRIDE - PAD_H, left = tile_column * STRIDE - LEFT; /* a multiple of VEC, as the width is */
  for (int begin = threadIdx.x; begin < VECTORS; begin += THREADS * IN_FLIGHT) {
    Pack<real, VEC> p[IN_FLIGHT];
    bool inside[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      const int vector = begin + i * THREADS, row = top + vector / ROW_VECTORS, column = left + vector % ROW_VECTORS * VEC;
      inside[i] = vector < VECTORS && row >= 0 && row < height && column >= 0 && column < width;
      if (inside[i]) p[i] = read_once<VEC>(of_plane + (size_t)row * width + column);
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      const int vector = begin + i * THREADS;
      if (vector < VECTORS)
#pragma unroll
        for (int k = 0; k < VEC; k++)
          tile[vector / ROW_VECTORS][vector % ROW_VECTORS * VEC + k] = inside[i] ? widened(p[i].at[k]) : OUTSIDE;
    }
  }
  __syncthreads();

  const int across = threadIdx.x % WIDE, down = (int)(threadIdx.x / WIDE) * DOWN;
#if WEIGHTS == 1
  float w[WINDOW_H][WINDOW_W];
#pragma unroll
  for (int i = 0; i < WINDOW_H * WINDOW_W; i++)
    w[i / WINDOW_W][i % WINDOW_W] = widened(weights[plane % channels * (WINDOW_H * WINDOW_W) + i]);
#endif
  float sums[DOWN];
#pragma unroll
  for (int d = 0; d < DOWN; d++) sums[d] = OUTSIDE;
#pragma unroll
  for (int row = 0; row < (DOWN - 1) * STRIDE + WINDOW_H; row++) {
    float window[WINDOW_W];
#pragma unroll
    for (int j = 0; j < WINDOW_W; j++) window[j] = tile[down * STRIDE + row][across * STRIDE + LEFT - PAD_W + j];
#pragma unroll
    for (int d = 0; d < DOWN; d++) {
      const int i = row - d * STRIDE;
      if (i >= 0 && i < WINDOW_H) {
#if WEIGHTS == 2
        const int channel = tile_row + down + d < height ? tile_row + down + d : height - 1;
        const Pack<real, WINDOW_W> w = read<WINDOW_W>(weights + channel * WINDOW_W);
#pragma unroll
        for (int j = 0; j < WINDOW_W; j++) TAKE(sums[d], window[j], widened(w.at[j]))
#else
#pragma unroll
        for (int j = 0; j < WINDOW_W; j++) TAKE(sums[d], window[j], w[i][j])
#endif
      }
    }
  }
  const int column = tile_column + across;
#pragma unroll
  for (int d = 0; d < DOWN; d++) {
    const int row = tile_row + down + d;
    if (row < out_height && column < out_width) {
      Pack<real, 1> result;
      result.at[0] = narrowed(RESULT(sums[d]));
      write<1>(out + (plane * out_height + row) * out_width + column, result);
    }
  }
}
