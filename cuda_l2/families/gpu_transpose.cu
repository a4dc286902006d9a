/* out[i, j] = x[i, j] + y[j, i]: a tile of y turns round in shared memory, so that all three are read and written by rows.
 *
 * Set from outside: DTYPE, VEC (elements a load; divides rows and columns), TILE (a side of the tile), THREADS, LOAD, STORE. */
#include "gpu_task.cuh"

#ifndef VEC
#define VEC 4
#endif
#ifndef TILE
#define TILE 32
#endif
#ifndef THREADS
#define THREADS 256
#endif
#define ROW_VECTORS (TILE / VEC)
#define VECTORS (TILE * ROW_VECTORS)
#define ITEMS ((VECTORS + THREADS - 1) / THREADS)

extern "C" __global__ void __launch_bounds__(THREADS)
    transpose_add(const real *x, const real *y, real *out, int rows, int columns) {
  __shared__ float turned[TILE][TILE + 1]; /* one more, so that a column's elements lie in other banks */
  const int column = (int)blockIdx.x * TILE, row = (int)blockIdx.y * TILE;
  Pack<real, VEC> of_x[ITEMS], of_y[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const int vector = i * THREADS + (int)threadIdx.x, down = vector / ROW_VECTORS, along = vector % ROW_VECTORS * VEC;
    if (vector < VECTORS && column + down < columns && row + along < rows)
      of_y[i] = read_once<VEC>(y + (size_t)(column + down) * rows + row + along);
    if (vector < VECTORS && row + down < rows && column + along < columns)
      of_x[i] = read_once<VEC>(x + (size_t)(row + down) * columns + column + along);
  }
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const int vector = i * THREADS + (int)threadIdx.x, down = vector / ROW_VECTORS, along = vector % ROW_VECTORS * VEC;
    if (vector < VECTORS && column + down < columns && row + along < rows)
#pragma unroll
      for (int k = 0; k < VEC; k++) turned[along + k][down] = widened(of_y[i].at[k]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ITEMS; i++) {
    const int vector = i * THREADS + (int)threadIdx.x, down = vector / ROW_VECTORS, along = vector % ROW_VECTORS * VEC;
    if (vector < VECTORS && row + down < rows && column + along < columns) {
      Pack<real, VEC> sum;
#pragma unroll
      for (int k = 0; k < VEC; k++) sum.at[k] = narrowed(widened(of_x[i].at[k]) + turned[down][along + k]);
      write<VEC>(out + (size_t)(row + down) * columns + column + along, sum);
    }
  }
}
