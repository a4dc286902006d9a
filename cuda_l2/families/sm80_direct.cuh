// Operands straight from global memory to registers: no shared memory and no barrier before the first multiplication.
//
// mma may see K in any order as long as A and B agree, so thread t of a quad takes 8 neighbouring elements of a row, at
// 8 t of a block of 32, as its columns of two mma. Likewise the g-th column of mma piece j is column g NI + j of the
// warp's part of C: row-major B is read NI neighbours at a time, and a thread has 2 NI neighbours of C to store.

// COUNT elements as words, in pieces of VECTOR; zeros for elements from `inside` on.
template <int COUNT, int VECTOR> DEVICE void load_row(unsigned (&to)[(COUNT + 1) / 2], const Element *from, int inside) {
  if constexpr (VECTOR == 1) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
      to[i / 2] = load<1>(from + i, i < inside);
      if (COUNT > 1) to[i / 2] |= static_cast<unsigned>(load<1>(from + i + 1, i + 1 < inside)) << 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i += VECTOR)
      *reinterpret_cast<Vector<VECTOR> *>(to + i / 2) = load<VECTOR>(from + i, i < inside);
  }
}

// Rows of a thread's block of B, as loaded: its NI columns of 8 (column-major B), or 8 rows of NI.
constexpr int B_ROWS = LAYOUT_TN ? NI : 8, B_COUNT = LAYOUT_TN ? 8 : NI;
using RowsB = unsigned[B_ROWS][(B_COUNT + 1) / 2];

// Elements 2 word and 2 word + 1 along K of column j.
DEVICE unsigned b_word(const RowsB &rows, int j, int word) {
#if LAYOUT_TN
  return rows[j][word];
#else
  return __byte_perm(rows[2 * word][j / 2], rows[2 * word + 1][j / 2], j % 2 ? 0x7632 : 0x5410);
#endif
}

DEVICE void direct(Sums &sums, const Element *a, const Element *b, int m, int n, int k, const Warp &warp, const Work &work) {
  constexpr int BLOCKS = WARP_K / 32, B_VECTOR = LAYOUT_TN ? K_VECTOR : least(N_VECTOR, NI);
  const int row = work.row + warp.m * WARP_M + warp.group;
  const int column = work.column + warp.n * WARP_N + warp.group * NI;
#pragma unroll 1
  for (int trip = 0; trip < (ONE_TRIP ? 1 : work.trips); trip++) {
    const int first = work.k0 + trip * BK + warp.k * WARP_K + warp.quad * 8;
    unsigned a_rows[BLOCKS][2 * MI][4];
    RowsB b_rows[BLOCKS];
#pragma unroll
    for (int s = 0; s < BLOCKS; s++) {
      const int at = first + 32 * s, inside = WHOLE_K ? 8 : k - at;
#pragma unroll
      for (int i = 0; i < 2 * MI; i++) {  // rows beyond M: any will do, their sums are not stored
        const int r = WHOLE_M ? row + 8 * i : min(row + 8 * i, m - 1);
        load_row<8, K_VECTOR>(a_rows[s][i], a + static_cast<long long>(r) * k + at, inside);
      }
#pragma unroll
      for (int j = 0; j < B_ROWS; j++) {
        if constexpr (LAYOUT_TN) {
          const int c = WHOLE_N ? column + j : min(column + j, n - 1);
          load_row<B_COUNT, B_VECTOR>(b_rows[s][j], b + static_cast<long long>(c) * k + at, inside);
        } else {
          const int width = j < inside ? (WHOLE_N ? NI : n - column) : 0;
          load_row<B_COUNT, B_VECTOR>(b_rows[s][j], b + static_cast<long long>(at + j) * n + column, width);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < BLOCKS; s++)
#pragma unroll
      for (int half_block = 0; half_block < 2; half_block++)
#pragma unroll
        for (int j = 0; j < NI; j++) {
          unsigned b_words[2];
#pragma unroll
          for (int e = 0; e < 2; e++) b_words[e] = b_word(b_rows[s], j, half_block * 2 + e);
#pragma unroll
          for (int i = 0; i < MI; i++) {
            const auto &upper = a_rows[s][2 * i], &lower = a_rows[s][2 * i + 1];
            const unsigned a_words[4] = {upper[half_block * 2], lower[half_block * 2], upper[half_block * 2 + 1],
                                         lower[half_block * 2 + 1]};
            multiply(sums[i][j], a_words, b_words[0], b_words[1]);
          }
        }
  }
}
