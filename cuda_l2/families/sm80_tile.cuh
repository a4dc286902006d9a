// Operand tiles in shared memory: where an element lies, and how a block fetches a tile.

// CuTe's Swizzle<bits, base, shift> on an offset in halves. `added` is known when compiling: whole periods of the
// permutation pass through it, so that a thread keeps few addresses.
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

// ROWS x COLUMNS of a row-major operand, fetched trip after trip along K. K runs down the rows (K_DOWN: row-major B) or
// along them; the other side, M or N, is `outer`. Rows are copied VECTOR halves at a time.
//
// A tile lies in panels of at most 64 columns (128 bytes, all banks once), row after row; the columns that one warp
// reads, PART, are whole panels or lie within one. Beyond K zeros arrive. Beyond M or N anything may, as no stored sum
// uses it: the last row or piece stands in. OUTER_WHOLE: there is no such part.
template <int ROWS, int COLUMNS, int PART, int VECTOR, bool K_DOWN, bool OUTER_WHOLE> class Tile {
 public:
  static constexpr int WIDTH = panel_width(COLUMNS, PART), BYTES = ROWS * COLUMNS * 2;
  static DEVICE int start(int column) { return column / WIDTH * (ROWS * WIDTH) + column % WIDTH; }

  DEVICE Tile(const Element *operand, int stride, int outer, int outer_size, int k0, int k)
      : operand_(operand), stride_(stride), outer_(outer), outer_size_(outer_size), left_(k - k0) {
    at_ = operand + (K_DOWN ? static_cast<long long>(k0) * stride : k0) + (LINEAR ? offset(0) : 0);
  }

  // Begins to copy the next tile into shared memory at `to`.
  DEVICE void fetch(unsigned to) {
    if constexpr (LOAD == 2 && VECTOR > 1) {
#pragma unroll(ROUNDS > 8 ? 4 : ROUNDS)  // many addresses are not worth keeping
      for (int i = 0; i < ROUNDS; i++) {
        if (COPIES % THREADS && i == ROUNDS - 1 && !exists(i)) break;
        copy_async<VECTOR * 2>(to + destination(i), inside(i) ? source(i) : operand_, inside(i));
      }
    } else {  // through registers, so many loads in flight at once
      constexpr int BATCH = ROUNDS < 8 ? ROUNDS : 8;
#pragma unroll 1
      for (int first = 0; first < ROUNDS; first += BATCH) {
        Vector<VECTOR> values[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
          values[i] = load<VECTOR>(source(first + i), exists(first + i) && inside(first + i));
#pragma unroll
        for (int i = 0; i < BATCH; i++)
          if (exists(first + i)) store_shared(to + destination(first + i), values[i]);
      }
    }
    at_ += K_DOWN ? static_cast<long long>(BK) * stride_ : BK;
    left_ -= BK;
  }

 private:
  static constexpr int COPIES_A_ROW = COLUMNS / VECTOR, COPIES = ROWS * COPIES_A_ROW;
  static constexpr int ROUNDS = (COPIES + THREADS - 1) / THREADS;
  static constexpr bool REGULAR = THREADS % COPIES_A_ROW == 0;  // a thread's copies lie below one another
  static constexpr int STEP = REGULAR ? THREADS / COPIES_A_ROW : 0;  // rows apart
  static constexpr bool LINEAR = REGULAR && (OUTER_WHOLE || K_DOWN);

  const Element *operand_, *at_;  // at_: this thread's first copy if LINEAR, else where the trip begins
  int stride_, outer_, outer_size_, left_;  // left_: of K

  static DEVICE int row(int i) {
    return REGULAR ? threadIdx.x / COPIES_A_ROW + i * STEP : (threadIdx.x + i * THREADS) / COPIES_A_ROW;
  }
  static DEVICE int column(int i) {
    return (REGULAR ? threadIdx.x : threadIdx.x + i * THREADS) % COPIES_A_ROW * VECTOR;
  }
  static DEVICE bool exists(int i) { return COPIES % THREADS ? threadIdx.x + i * THREADS < COPIES : i < ROUNDS; }
  static DEVICE unsigned destination(int i) {
    return 2 * (REGULAR ? swizzled(start(column(0)) + row(0) * WIDTH, i * STEP * WIDTH)
                        : swizzled(start(column(i)) + row(i) * WIDTH, 0));
  }
  DEVICE bool inside(int i) const { return WHOLE_K || (K_DOWN ? row(i) : column(i)) < left_; }
  DEVICE long long offset(int i) const {
    int other = outer_ + (K_DOWN ? column(i) : row(i));
    if (!OUTER_WHOLE) other = min(other, outer_size_ - (K_DOWN ? VECTOR : 1));
    return K_DOWN ? static_cast<long long>(row(i)) * stride_ + other
                  : static_cast<long long>(other) * stride_ + column(i);
  }
  DEVICE const Element *source(int i) const {
    return at_ + (LINEAR ? static_cast<long long>(i * STEP) * stride_ : offset(i));
  }
};
