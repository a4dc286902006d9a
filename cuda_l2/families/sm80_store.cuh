// From a block's sums to C: warps along K add up, threads gather neighbouring columns and store them.
//
// A thread's sums in store order: x = i 2 NI + y for the i-th of its 2 MI rows, which lie 8 apart. With LOAD 0 its
// columns are 2 NI neighbours; otherwise y = 2 j + c is column c of its pair in mma piece j.

#if SPLIT_K > 1
using Output = float;  // a partial sum of every element, part after part
#else
using Output = Element;
#endif

constexpr int SUMS = MI * NI * 4, SHARE = SUMS / WARPS_K;  // of a thread, before and after warps along K have added up
static_assert(SUMS % (2 * WARPS_K) == 0, "a thread stores pairs");
constexpr int span() {
  int columns = LOAD == 0 ? 2 * NI : EPILOGUE != 1 ? 2 : NI % 4 == 0 ? 8 : 4;
  while (SHARE % columns) columns /= 2;
  return columns;
}
constexpr int SPAN = span();     // neighbouring columns a thread has to store together
constexpr int C_PITCH = BN + 8;  // elements a row of C takes in shared memory, so that a piece's rows hit all banks
static_assert(LOAD == 0 || SPLIT_K == 1 || SPAN == 2, "threads exchange halves, not partial sums");

__host__ DEVICE constexpr int least(int x, int y) { return x < y ? x : y; }
template <int COUNT> struct alignas(4 * COUNT) Floats {  // moved by one instruction
  float x[COUNT];
};

DEVICE float sum_of(const float (&sums)[4], int index) { return sums[index]; }
#if !BF16
DEVICE float sum_of(const unsigned (&sums)[2], int index) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(sums[index / 2] >> 16 * (index % 2))));
}
#endif

#if BF16
DEVICE unsigned pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned *>(&pair);
}
DEVICE Element element_of(unsigned short bits) { return __ushort_as_bfloat16(bits); }
#else
DEVICE unsigned pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned *>(&pair);
}
DEVICE Element element_of(unsigned short bits) { return __ushort_as_half(bits); }
#endif

// COUNT elements, given as words, in pieces of VECTOR; elements from `inside` on are left alone.
template <int COUNT, int VECTOR> DEVICE void store_row(Element *to, const unsigned *words, int inside) {
#pragma unroll
  for (int i = 0; i < COUNT; i += VECTOR) {
    if (i >= inside) break;
    if constexpr (VECTOR == 1)
      to[i] = element_of(static_cast<unsigned short>(words[i / 2] >> 16 * (i % 2)));
    else
      *reinterpret_cast<Vector<VECTOR> *>(to + i) = *reinterpret_cast<const Vector<VECTOR> *>(words + i / 2);
  }
}

// The WARPS_K warps of a tile leave their sums in shared memory, and each adds up its share, always in the same order.
DEVICE void add_up(float (&shares)[SHARE], const float (&sums)[SUMS], unsigned char *shared, const Warp &warp) {
  constexpr int VECTOR = SHARE % 4 ? 2 : 4;  // lanes take turns, so that no bank is hit twice
  const int place = (warp.m * WARPS_N + warp.n) * (WARPS_K * SUMS / VECTOR * 32) + warp.lane;
  Floats<VECTOR> *tile = reinterpret_cast<Floats<VECTOR> *>(shared) + place;
  if (LOAD) __syncthreads();  // nobody reads the stages any more
#pragma unroll
  for (int x = 0; x < SUMS; x += VECTOR) {
    Floats<VECTOR> floats;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) floats.x[i] = sums[x + i];
    tile[(warp.k * SUMS + x) / VECTOR * 32] = floats;
  }
  __syncthreads();
#pragma unroll
  for (int x = 0; x < SHARE; x++) shares[x] = 0;
#pragma unroll
  for (int other = 0; other < WARPS_K; other++)
#pragma unroll
    for (int x = 0; x < SHARE; x += VECTOR) {
      const Floats<VECTOR> floats = tile[(other * SUMS + warp.k * SHARE + x) / VECTOR * 32];
#pragma unroll
      for (int i = 0; i < VECTOR; i++) shares[x + i] += floats.x[i];
    }
}

// Threads of a quad hold pairs of SPAN / 2 pieces; afterwards each holds SPAN neighbours of one piece: a transposition.
DEVICE void exchange(unsigned (&words)[SPAN / 2], int quad) {
#pragma unroll
  for (int bit = 1; bit < SPAN / 2; bit *= 2)
#pragma unroll
    for (int i = 0; i < SPAN / 2; i++) {
      if (i & bit) continue;
      const unsigned received = __shfl_xor_sync(~0u, quad & bit ? words[i] : words[i | bit], bit);
      (quad & bit ? words[i] : words[i | bit]) = received;
    }
}

// First column, within the warp's part of C, of a thread's span at y.
DEVICE int span_column(int y, int quad) {
  if (LOAD == 0) return 2 * NI * quad + y;
  if (SPAN == 8) return (y / 2 + quad) * 8;
  if (SPAN == 4) return (y / 2 + quad % 2) * 8 + quad / 2 * 4;
  return y / 2 * 8 + quad * 2;
}

DEVICE void finish(const Sums &sums, unsigned char *shared, Output *out, int m, int n, const Warp &warp,
                   const Work &work) {
  float ordered[SUMS], shares[SHARE];
#pragma unroll
  for (int x = 0; x < SUMS; x++) {
    const int i = x / (2 * NI), y = x % (2 * NI), j = LOAD ? y / 2 : y % NI, c = LOAD ? y % 2 : y / NI;
    ordered[x] = sum_of(sums[i / 2][j], i % 2 * 2 + c);
  }
  if constexpr (WARPS_K > 1) {
    add_up(shares, ordered, shared, warp);
  } else {
#pragma unroll
    for (int x = 0; x < SUMS; x++) shares[x] = ordered[x];
  }
  constexpr bool THROUGH_SHARED = LOAD && EPILOGUE == 2;
  if (THROUGH_SHARED) __syncthreads();
#pragma unroll
  for (int u = 0; u < SHARE; u += SPAN) {
    const int x = warp.k * SHARE + u;  // of the ordered sums
    const int row = warp.m * WARP_M + x / (2 * NI) * 8 + warp.group;
    const int column = warp.n * WARP_N + span_column(x % (2 * NI), warp.quad);
    const bool stored = WHOLE_M || work.row + row < m;
    const int inside = WHOLE_N ? SPAN : n - work.column - column;
    const long long at = static_cast<long long>(work.row + row) * n + work.column + column;
#if SPLIT_K > 1
    constexpr int PIECE = least(SPAN, least(N_VECTOR, 4));
    float *partial = out + static_cast<long long>(blockIdx.z % SPLIT_K) * m * n + at;
#pragma unroll
    for (int i = 0; i < SPAN; i += PIECE) {
      Floats<PIECE> piece;
#pragma unroll
      for (int e = 0; e < PIECE; e++) piece.x[e] = shares[u + i + e];
      if (stored && i < inside) *reinterpret_cast<Floats<PIECE> *>(partial + i) = piece;
    }
#else
    unsigned words[SPAN / 2];
#pragma unroll
    for (int i = 0; i < SPAN / 2; i++) words[i] = pack(shares[u + 2 * i], shares[u + 2 * i + 1]);
    if constexpr (LOAD && SPAN > 2) exchange(words, warp.quad);
    if (THROUGH_SHARED)
      *reinterpret_cast<unsigned *>(shared + 2 * (row * C_PITCH + column)) = words[0];
    else if (stored)
      store_row<SPAN, least(SPAN, N_VECTOR)>(out + at, words, inside);
#endif
  }
#if SPLIT_K == 1
  if constexpr (THROUGH_SHARED) {
    __syncthreads();
    constexpr int PIECES = BN / N_VECTOR;
#pragma unroll 4
    for (int i = threadIdx.x; i < BM * PIECES; i += THREADS) {
      const int row = i / PIECES, column = i % PIECES * N_VECTOR;
      if ((WHOLE_M || work.row + row < m) && (WHOLE_N || work.column + column < n))
        *reinterpret_cast<Vector<N_VECTOR> *>(out + static_cast<long long>(work.row + row) * n + work.column + column) =
            *reinterpret_cast<const Vector<N_VECTOR> *>(shared + 2 * (row * C_PITCH + column));
    }
  }
#endif
}

#if SPLIT_K > 1
// C from the SPLIT_K partial sums of every element, always added in the same order. size = M N.
extern "C" __global__ void __launch_bounds__(256) reduce(const float *partial, Element *c, long long size DEPENDENT) {
  wait_for_kernel_before();
#if PDL
  if (dependent) let_next_kernel_begin();
#endif
  constexpr int PIECE = least(N_VECTOR, 4);
  const long long at = (static_cast<long long>(blockIdx.x) * 256 + threadIdx.x) * PIECE;
  if (at >= size) return;
  float sums[PIECE] = {};
#pragma unroll
  for (int part = 0; part < SPLIT_K; part++) {
    const Floats<PIECE> piece = *reinterpret_cast<const Floats<PIECE> *>(partial + part * size + at);
#pragma unroll
    for (int i = 0; i < PIECE; i++) sums[i] += piece.x[i];
  }
  unsigned words[(PIECE + 1) / 2];
#pragma unroll
  for (int i = 0; i < PIECE; i += 2) words[i / 2] = pack(sums[i], sums[least(i + 1, PIECE - 1)]);
  store_row<PIECE, PIECE>(c + at, words, PIECE);
}
#endif
