#pragma once
// The epilogue of sm90_wave.cu: C from the sums of a warp, by stmatrix through shared memory (PTX ISA, stmatrix), so that
// global stores are 16 bytes and rows contiguous. (Storing fragments straight from registers, 4 bytes a thread, is 0.3 to
// 1.5 us slower.) Thread `lane` holds sums 4 j to 4 j + 3 of rows lane / 4 and lane / 4 + 8, columns 8 j + lane % 4 * 2 and
// the next (PTX ISA, wgmma accumulator fragment).
#include "sm90_wave_shape.cuh"

// 8 elements of a row of C.
DEV void store_chunk(u16 *C, int M, int N, int row, int column, uint4 v) {
  u16 *at = C + (u64)row * N + column;
  if (EDGES == 2) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 8; e++)
      if (row < M && column + e < N) at[e] = (u16)(word[e / 2] >> e % 2 * 16);
  } else if (EDGES == 0 || (row < M && column < N)) {
    *(uint4 *)at = v;
  }
}

// A warp's 16 x W part of C.
template <int W, class T> DEV void store_rows(u16 *C, int M, int N, const T *sums, int row, int column, u32 stage, int lane) {
  constexpr int PITCH = W * 2 + 16, CHUNKS = W / 8, ALL = 16 * CHUNKS;
#pragma unroll
  for (int j = 0; j < W / 8; j += 2)
    if (j + 1 < W / 8)
      stmatrix4<false>(stage + (lane & 15) * PITCH + (j + (lane >> 4)) * 16, pair(sums, 2 * j), pair(sums, 2 * j + 1),
                       pair(sums, 2 * j + 2), pair(sums, 2 * j + 3));
    else
      stmatrix2(stage + (lane & 15) * PITCH + j * 16, pair(sums, 2 * j), pair(sums, 2 * j + 1));
  __syncwarp();
#pragma unroll
  for (int q = 0; q < (ALL + 31) / 32; q++) {
    const int i = q * 32 + lane, line = i / CHUNKS, chunk = i % CHUNKS;
    if (ALL % 32 == 0 || i < ALL)
      store_chunk(C, M, N, row + line, column + chunk * 8, ld_shared(stage + line * PITCH + chunk * 16));
  }
  __syncwarp();
}

// The same for swapped operands: 16 columns x W rows of C.
template <int W, class T> DEV void store_columns(u16 *C, int M, int N, const T *sums, int row, int column, u32 stage, int lane) {
  constexpr int PITCH = 48;  // 32 bytes of data; rows 48 bytes apart do not collide
#pragma unroll
  for (int j = 0; j < W / 8; j += 2)
    stmatrix4<true>(stage + ((j + (lane >> 4)) * 8 + (lane & 7)) * PITCH + ((lane >> 3) & 1) * 16, pair(sums, 2 * j),
                    pair(sums, 2 * j + 1), pair(sums, 2 * j + 2), pair(sums, 2 * j + 3));
  __syncwarp();
#pragma unroll
  for (int q = 0; q < W * 2 / 32; q++) {
    const int i = q * 32 + lane, line = i / 2, chunk = i % 2;
    store_chunk(C, M, N, row + line, column + chunk * 8, ld_shared(stage + line * PITCH + chunk * 16));
  }
  __syncwarp();
}

// A pair of neighbouring sums of a thread.
DEV void store_pair(u16 *C, int M, int N, const float *sums, int row, int column) {
  const u32 word = pair(sums, 0);
  u16 *at = C + (u64)row * N + column;
  if (EDGES < 2) {
    if (EDGES == 0 || (row < M && column < N)) *(u32 *)at = word;
  } else {
    if (row < M && column < N) at[0] = (u16)word;
    if (row < M && column + 1 < N) at[1] = (u16)(word >> 16);
  }
}

// A warp's share of sums that were split: RL a thread, from its sum number `first` on.
DEV void store_share(u16 *C, int M, int N, const float *out, int first, int wrow, int col0, u32 stage, int lane) {
  if constexpr (RL >= NA) {
#pragma unroll
    for (int m = 0; m < RL / NA; m++) store_rows<BN>(C, M, N, out + m * NA, wrow + (first / NA + m) * 64, col0, stage, lane);
  } else if constexpr (RL >= 4) {
    store_rows<RL * 2>(C, M, N, out, wrow + first / NA * 64, col0 + first % NA * 2, stage, lane);
  } else {
    const int y = first % NA, row = wrow + first / NA * 64 + (lane >> 2) + ((y & 2) ? 8 : 0);
    store_pair(C, M, N, out, row, col0 + (y >> 2) * 8 + (lane & 3) * 2);
  }
}
