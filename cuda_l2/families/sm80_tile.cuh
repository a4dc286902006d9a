// Operand tiles in shared memory: where an element lies, and how a block fetches a tile.

// CuTe's Swizzle<bits, base, shift> on an offset in halves. `added` is known when compiling: whole periods of the
// permutation pass through it, so a thread keeps few addresses.
DEVICE int swizzled(int offset, int added) {
  constexpr int MASK = (1 << SWIZZLE_BITS) - 1;
  constexpr int PERIOD = SWIZZLE_BITS ? 1 << (SWIZZLE_BITS + SWIZZLE_BASE + SWIZZLE_SHIFT) : 1;
  const int x = offset + added % PERIOD;
  return (x ^ ((x >> (SWIZZLE_BASE + SWIZZLE_SHIFT) & MASK) << SWIZZLE_BASE)) + added / PERIOD * PERIOD;
}

constexpr int panel_width(int columns, int part) {
  int width = 64;
  while (columns % width || (part % width && width % part)) width /= 2;
  return width;
}

// ROWS x COLUMNS of a row-major matrix whose rows are copied VECTOR halves at a time. It lies in panels of at most 64
// columns (128 bytes, all banks once), row after row; the columns one warp reads, PART, are panels or lie within one.
// K_DOWN: k runs over the rows (row-major B), else over the columns. OUTER_WHOLE: no tile sticks out of M or N.
template <int ROWS, int COLUMNS, int PART, int VECTOR, bool K_DOWN, bool OUTER_WHOLE> struct Tile {
  static constexpr int WIDTH = panel_width(COLUMNS, PART), BYTES = ROWS * COLUMNS * 2;
  static constexpr int COPIES_A_ROW = COLUMNS / VECTOR, COPIES = ROWS * COPIES_A_ROW;
  static constexpr int ROUNDS = (COPIES + THREADS - 1) / THREADS;
  static constexpr bool REGULAR = THREADS % COPIES_A_ROW == 0;  // a thread stays in its column

  static DEVICE int start(int column) { return column / WIDTH * (ROWS * WIDTH) + column % WIDTH; }

  // Fetch the tile at (outer, k0) of an M x K or N x K operand into shared memory at `to`. Beyond K zeros arrive; rows
  // of A and columns of B beyond `outer_size` may hold anything, as no stored sum uses them: the last one stands in.
  static DEVICE void fetch(unsigned to, const half *from, int stride, int outer, int k0, int outer_size, int k) {
    if constexpr (LOAD == 2 && VECTOR > 1) {
#pragma unroll(ROUNDS > 8 ? 4 : ROUNDS)  // many addresses are not worth keeping
      for (int i = 0; i < ROUNDS; i++) {
        if (COPIES % THREADS && i == ROUNDS - 1 && threadIdx.x + i * THREADS >= COPIES) break;
        bool inside;
        const half *source = locate(i, from, stride, outer, k0, outer_size, k, inside);
        copy_async<VECTOR * 2>(to + destination(i), source, inside);
      }
    } else {  // through registers, so many loads in flight at once
      constexpr int BATCH = ROUNDS < 8 ? ROUNDS : 8;
#pragma unroll 1
      for (int first = 0; first < ROUNDS; first += BATCH) {
        Vector<VECTOR> values[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          bool inside;
          const half *source = locate(first + i, from, stride, outer, k0, outer_size, k, inside);
          values[i] = load<VECTOR>(source, inside && threadIdx.x + (first + i) * THREADS < COPIES);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++)
          if (threadIdx.x + (first + i) * THREADS < COPIES)
            *static_cast<Vector<VECTOR> *>(__cvta_shared_to_generic(to + destination(first + i))) = values[i];
      }
    }
  }

 private:
  static DEVICE int row(int i) {
    return REGULAR ? threadIdx.x / COPIES_A_ROW + i * (THREADS / COPIES_A_ROW) : (threadIdx.x + i * THREADS) / COPIES_A_ROW;
  }
  static DEVICE int column(int i) {
    return (REGULAR ? threadIdx.x % COPIES_A_ROW : (threadIdx.x + i * THREADS) % COPIES_A_ROW) * VECTOR;
  }
  static DEVICE unsigned destination(int i) {
    if constexpr (REGULAR)
      return 2 * swizzled(start(column(0)) + row(0) * WIDTH, i * (THREADS / COPIES_A_ROW) * WIDTH);
    return 2 * swizzled(start(column(i)) + row(i) * WIDTH, 0);
  }
  static DEVICE const half *locate(int i, const half *from, int stride, int outer, int k0, int outer_size, int k,
                                   bool &inside) {
    int other = outer + (K_DOWN ? column(i) : row(i));
    if (!OUTER_WHOLE) other = min(other, outer_size - (K_DOWN ? VECTOR : 1));
    inside = WHOLE_K || k0 + (K_DOWN ? row(i) : column(i)) < k;
    // in this order a thread's part stays the same from trip to trip
    const long long offset = K_DOWN ? static_cast<long long>(row(i)) * stride + other + static_cast<long long>(k0) * stride
                                    : static_cast<long long>(other) * stride + column(i) + k0;
    return from + (inside ? offset : 0);
  }
};
