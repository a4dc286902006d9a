// Operands through shared memory: a ring of STAGES buffers, one barrier a trip (two with one buffer), fragments by
// ldmatrix.
#include "sm80_tile.cuh"

constexpr int K_STEPS = WARP_K / 16;  // mma steps of a warp a trip
constexpr int fragment_sets() {
  static_assert(PREFETCH < K_STEPS, "fragments are loaded less than a trip ahead");
  int sets = PREFETCH + 1;
  while (K_STEPS % sets) sets++;  // so that which set a step uses is known when compiling
  return sets;
}
constexpr int SETS = fragment_sets();

using TileA = Tile<BM, BK, WARP_K, K_VECTOR, false, WHOLE_M>;
#if LAYOUT_TN
using TileB = Tile<BN, BK, WARP_K, K_VECTOR, false, WHOLE_N>;
#else
using TileB = Tile<BK, BN, WARP_N, N_VECTOR, true, WHOLE_N>;
#endif
constexpr int STAGE_BYTES = TileA::BYTES + TileB::BYTES;

struct Fragments {
  unsigned a[MI][4], b[NI / 2][4];  // b: two 8-column pieces together
};

// Reads a warp's fragments from a stage; keeps where this thread's rows begin.
class Reader {
 public:
  DEVICE explicit Reader(const Warp &warp) {
    const int lane = warp.lane;
    a_ = (warp.m * WARP_M + lane % 16) * TileA::WIDTH + TileA::start(warp.k * WARP_K) + lane / 16 * 8;
    if (LAYOUT_TN)
      b_ = (warp.n * WARP_N + lane % 8 + lane / 16 * 8) * TileB::WIDTH + TileB::start(warp.k * WARP_K) +
           lane / 8 % 2 * 8;
    else
      b_ = (warp.k * WARP_K + lane % 16) * TileB::WIDTH + TileB::start(warp.n * WARP_N) + lane / 16 * 8;
  }
  DEVICE void read_a(Fragments &to, unsigned stage, int step) const {
#pragma unroll
    for (int i = 0; i < MI; i++)
      load_matrices(to.a[i], stage + 2 * swizzled(a_, i * 16 * TileA::WIDTH + TileA::start(16 * step)));
  }
  DEVICE void read_b(Fragments &to, unsigned stage, int step) const {
#pragma unroll
    for (int j = 0; j < NI / 2; j++) {
      if (LAYOUT_TN)
        load_matrices(to.b[j], stage + TileA::BYTES +
                                   2 * swizzled(b_, j * 16 * TileB::WIDTH + TileB::start(16 * step)));
      else
        load_matrices_transposed(to.b[j], stage + TileA::BYTES +
                                              2 * swizzled(b_, step * 16 * TileB::WIDTH + TileB::start(16 * j)));
    }
  }

 private:
  int a_, b_;  // offsets in halves, before the swizzle
};

DEVICE void multiply_all(Sums &sums, const Fragments &fragments) {
#pragma unroll
  for (int i = 0; i < MI; i++)
#pragma unroll
    for (int j = 0; j < NI; j++)
      multiply(sums[i][j], fragments.a[i], fragments.b[j / 2][j % 2 * 2], fragments.b[j / 2][j % 2 * 2 + 1]);
}

DEVICE void staged(Sums &sums, const unsigned char *shared, const Element *a, const Element *b, int m, int n, int k,
                   const Warp &warp, const Work &work) {
  const Reader reader(warp);
  TileA tile_a(a, k, work.row, m, work.k0, k);
  TileB tile_b(b, LAYOUT_TN ? k : n, work.column, n, work.k0, k);
  const int trips = ONE_TRIP ? 1 : work.trips;
  const unsigned ring = shared_address(shared);
  const auto fetch = [&](int trip, unsigned stage) {  // trips in order
    if (trip < trips) {
      tile_a.fetch(stage);
      tile_b.fetch(stage + TileA::BYTES);
    }
    commit_copies();
  };
#pragma unroll
  for (int s = 0; s < STAGES; s++) fetch(s, ring + s * STAGE_BYTES);
  wait_for_copies<STAGES - 1>();
  __syncthreads();

  Fragments sets[SETS];
#pragma unroll
  for (int s = 0; s < PREFETCH; s++) {
    reader.read_a(sets[s], ring, s);
    reader.read_b(sets[s], ring, s);
  }
  unsigned stage = ring;
#pragma unroll 1
  for (int trip = 0; trip < trips; trip++) {
    const unsigned next = STAGES == 1 || stage == ring + (STAGES - 1) * STAGE_BYTES ? ring : stage + STAGE_BYTES;
    const auto take_step = [&](int step, unsigned from) {
      Fragments &ahead = sets[(step + PREFETCH) % SETS];
      reader.read_a(ahead, from, (step + PREFETCH) % K_STEPS);
      if (!STAGGER) reader.read_b(ahead, from, (step + PREFETCH) % K_STEPS);
      multiply_all(sums, sets[step % SETS]);
      if (STAGGER) reader.read_b(ahead, from, (step + PREFETCH) % K_STEPS);
    };
#pragma unroll
    for (int step = 0; step < K_STEPS - PREFETCH; step++) take_step(step, stage);
    if (trip + 1 < trips) {  // all of this trip's stage has been read: once every warp is here it is filled again
      if constexpr (STAGES > 1) wait_for_copies<STAGES - 2>();
      __syncthreads();
      fetch(trip + STAGES, stage);
      if constexpr (STAGES == 1) __syncthreads();
    }
#pragma unroll
    for (int step = K_STEPS - PREFETCH; step < K_STEPS; step++) take_step(step, next);
    stage = next;
  }
}
