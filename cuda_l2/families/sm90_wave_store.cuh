#pragma once
// The epilogue of sm90_wave.cu: C from the sums of a warp, by stmatrix through shared memory (PTX ISA, stmatrix), so that
// global stores are 16 bytes and rows contiguous. (Storing fragments straight from registers, 4 bytes a thread, is 0.3 to
// 1.5 us slower.) Thread `lane` holds sums 4 j to 4 j + 3 of rows lane / 4 and lane / 4 + 8, columns 8 j + lane % 4 * 2 and
// the next (PTX ISA, wgmma accumulator fragment).
#include "sm90_wave_shape.cuh"

// Where a warp's part of C goes. It is worked out before the products, which take a while; after them every instruction
// counts.
struct Way {
  u32 put, get;       // shared memory: of this lane's rows of 8x8 pieces, and of the 16 bytes that it stores
  u64 at;             // global memory: of those 16 bytes, or where Lanes are not FIXED of the warp's part
  int rows, columns;  // of C, from there on
};

// Lanes that store the 16-byte pieces of rows of W elements. Where SIDE lanes side by side cover whole segments of memory,
// or the row, a lane has the same column in all the rows that it stores; else it takes piece after piece, and divides.
template <int W> struct Lanes {
  static constexpr int PIECES = W / 8, EVEN = PIECES & -PIECES, SIDE = EVEN < 32 ? EVEN : 32, LINES = 32 / SIDE;
  static constexpr bool FIXED = SIDE >= 4 || SIDE == PIECES;
};

template <int W, int PITCH> DEV Way way_to(u16 *C, int M, int N, int row, int column, u32 put, u32 stage, int lane) {
  const int line = Lanes<W>::FIXED ? lane / Lanes<W>::SIDE : 0, piece = Lanes<W>::FIXED ? lane % Lanes<W>::SIDE : 0;
  Way way{put, stage + line * PITCH + piece * 16, 0, M - row - line, N - column - piece * 8};
  way.at = (u64)__cvta_generic_to_global(C + (u64)(row + line) * N + column + piece * 8);
  asm volatile("" : "+r"(way.put), "+r"(way.get), "+l"(way.at));
  return way;
}

// 8 elements of a row of C, so many rows and columns on.
DEV void store_piece(const Way &way, int N, int down, int right, uint4 v) {
  u16 *at = (u16 *)__cvta_global_to_generic(way.at) + (u64)down * N + right;
  if (EDGES == 2) {
    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 8; e++)
      if (down < way.rows && right + e < way.columns) at[e] = (u16)(word[e / 2] >> e % 2 * 16);
  } else if (EDGES == 0 || (down < way.rows && right < way.columns)) {
    *(uint4 *)at = v;
  }
}

// ROWS rows of W elements from shared memory to C.
template <int W, int PITCH, int ROWS> DEV void store_lines(const Way &way, int N, int down, int right, int lane) {
  using L = Lanes<W>;
  if constexpr (L::FIXED) {
#pragma unroll
    for (int q = 0; q < ROWS; q += L::LINES)
#pragma unroll
      for (int c = 0; c < L::PIECES; c += L::SIDE)
        if (ROWS % L::LINES == 0 || q + lane / L::SIDE < ROWS)
          store_piece(way, N, down + q, right + c * 8, ld_shared(way.get + q * PITCH + c * 16));
  } else {
#pragma unroll
    for (int i0 = 0; i0 < ROWS * L::PIECES; i0 += 32) {
      const int i = i0 + lane, line = i / L::PIECES, piece = i % L::PIECES;
      if (ROWS * L::PIECES % 32 == 0 || i < ROWS * L::PIECES)
        store_piece(way, N, down + line, right + piece * 8, ld_shared(way.get + line * PITCH + piece * 16));
    }
  }
}

// A warp's 16 x W part of C, or with operands swapped its W rows x 16 columns.
template <int W> constexpr int pitch() { return SWAP ? 48 : W * 2 + 16; }  // of a staged row: neighbouring ones do not collide

template <int W> DEV Way way_of(u16 *C, int M, int N, int x, int y, u32 stage, int lane) {
  constexpr int PITCH = pitch<W>();
  if (SWAP) return way_to<16, PITCH>(C, M, N, y, x, stage + ((lane >> 4) * 8 + (lane & 7)) * PITCH + ((lane >> 3) & 1) * 16, stage, lane);
  return way_to<W, PITCH>(C, M, N, x, y, stage + (lane & 15) * PITCH + (lane >> 4) * 16, stage, lane);
}

// The part, or the one so many rows of X on. Sums are fp32 or pairs of fp16.
template <int W, class T> DEV void store_part(const Way &way, int N, const T *sums, int on, int lane) {
  constexpr int PITCH = pitch<W>(), STEP = SWAP ? 8 * PITCH : 16;
#pragma unroll
  for (int j = 0; j < W / 8; j += 2)
    if (j + 1 < W / 8)
      stmatrix4<SWAP>(way.put + j * STEP, pair(sums, 2 * j), pair(sums, 2 * j + 1), pair(sums, 2 * j + 2), pair(sums, 2 * j + 3));
    else
      stmatrix2<SWAP>(way.put + j * STEP, pair(sums, 2 * j), pair(sums, 2 * j + 1));
  __syncwarp();
  if constexpr (SWAP) store_lines<16, PITCH, W>(way, N, 0, on, lane);
  else store_lines<W, PITCH, 16>(way, N, on, 0, lane);
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

// A warp's share of the sums: RL a thread, from its sum number `first` on. Whole slabs, or W columns of one, or pairs.
constexpr bool SLABS = RL >= NA, PARTS = SLABS || RL % 4 == 0;
constexpr int SHARE_W = SLABS ? BN : RL * 2;

DEV Way way_of_share(u16 *C, int M, int N, int first, int wrow, int col0, u32 stage, int lane) {
  if constexpr (PARTS) return way_of<SHARE_W>(C, M, N, wrow + first / NA * 64, col0 + first % NA * 2, stage, lane);
  return {};
}

DEV void store_share(const Way &way, u16 *C, int M, int N, const float *out, int first, int wrow, int col0, int lane) {
  if constexpr (PARTS) {
#pragma unroll
    for (int m = 0; m < (SLABS ? RL / NA : 1); m++) store_part<SHARE_W>(way, N, out + m * NA, m * 64, lane);
  } else {
    const int x = wrow + first / NA * 64;
#pragma unroll
    for (int i = 0; i < RL; i += 2) {
      const int at = first % NA + i, row = x + (lane >> 2) + ((at & 2) ? 8 : 0), column = col0 + (at >> 2) * 8 + (lane & 3) * 2;
      if constexpr (SWAP) store_pair(C, M, N, out + i, column, row);
      else store_pair(C, M, N, out + i, row, column);
    }
  }
}
