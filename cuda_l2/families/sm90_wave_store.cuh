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

DEV void stmatrix2_transposed(u32 at, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}

// The same for swapped operands: 16 columns x W rows of C.
template <int W, class T> DEV void store_columns(u16 *C, int M, int N, const T *sums, int row, int column, u32 stage, int lane) {
  constexpr int PITCH = 48;  // 32 bytes of data; rows 48 bytes apart do not collide
#pragma unroll
  for (int j = 0; j + 1 < W / 8; j += 2)
    stmatrix4<true>(stage + ((j + (lane >> 4)) * 8 + (lane & 7)) * PITCH + ((lane >> 3) & 1) * 16, pair(sums, 2 * j),
                    pair(sums, 2 * j + 1), pair(sums, 2 * j + 2), pair(sums, 2 * j + 3));
  if constexpr (W % 16 > 0)
    stmatrix2_transposed(stage + (W - 8 + (lane & 7)) * PITCH + ((lane >> 3) & 1) * 16, pair(sums, W / 4 - 2), pair(sums, W / 4 - 1));
  __syncwarp();
#pragma unroll
  for (int q = 0; q < (W + 15) / 16; q++) {
    const int i = q * 32 + lane, line = i / 2, chunk = i % 2;
    if (W % 16 == 0 || line < W) store_chunk(C, M, N, row + line, column + chunk * 8, ld_shared(stage + line * PITCH + chunk * 16));
  }
  __syncwarp();
}

// A pair of neighbouring sums of a thread, in a row of C or, swapped, in a column.
DEV void store_pair(u16 *C, int M, int N, const float *sums, int row, int column) {
  const u32 word = pair(sums, 0);
  u16 *at = C + (u64)row * N + column;
  if (SWAP) {
    if (EDGES == 0 || (row < M && column < N)) at[0] = (u16)word;
    if (EDGES == 0 || (row + 1 < M && column < N)) at[N] = (u16)(word >> 16);
  } else if (EDGES < 2) {
    if (EDGES == 0 || (row < M && column < N)) *(u32 *)at = word;
  } else {
    if (row < M && column < N) at[0] = (u16)word;
    if (row < M && column + 1 < N) at[1] = (u16)(word >> 16);
  }
}

// A warp's share of sums that were split: RL a thread, from its sum number `first` on.
DEV void store_share(u16 *C, int M, int N, const float *out, int first, int wrow, int col0, u32 stage, int lane) {
  const int x = wrow + first / NA * 64, y = col0 + first % NA * 2;
  if constexpr (RL >= NA) {
#pragma unroll
    for (int m = 0; m < RL / NA; m++)
      if constexpr (SWAP) store_columns<BN>(C, M, N, out + m * NA, col0, x + m * 64, stage, lane);
      else store_rows<BN>(C, M, N, out + m * NA, x + m * 64, col0, stage, lane);
  } else if constexpr (RL % 4 == 0) {
    if constexpr (SWAP) store_columns<RL * 2>(C, M, N, out, y, x, stage, lane);
    else store_rows<RL * 2>(C, M, N, out, x, y, stage, lane);
  } else {
#pragma unroll
    for (int i = 0; i < RL; i += 2) {
      const int at = first % NA + i, row = x + (lane >> 2) + ((at & 2) ? 8 : 0), column = col0 + (at >> 2) * 8 + (lane & 3) * 2;
      if constexpr (SWAP) store_pair(C, M, N, out + i, column, row);
      else store_pair(C, M, N, out + i, row, column);
    }
  }
}
