#pragma once
// The producer of sm90_wave.cu: one thread fills the ring by TMA (PTX ISA, cp.async.bulk.tensor; mbarrier).
// Stage s holds X, [KB][BM][64] (K-major) or [BM / 64][64 KB][64] (MN-major), then Y in the same way.
#include "sm90_wave_work.cuh"

// Starts the loads of one step of K into stage s of the ring; full is the barrier of stage 0. TOGETHER: the block loads
// its slice for all that share it; else all for itself, which needs no other block to be there.
template <bool TOGETHER>
DEV void load_stage(u32 full, u32 ring, int s, const TensorMap *map_x, const TensorMap *map_y, const Work &work, int step) {
  constexpr bool SHARED_X = TOGETHER && CN > 1, SHARED_Y = TOGETHER && CM > 1;
  const u32 bar = full + s * 8, x = ring + s * STAGE_BYTES, y = x + X_BYTES;
  bar_expect(bar, STAGE_BYTES);
#pragma unroll
  for (int c = 0; c < (SHARED_X ? 1 : CN); c++)
    load_slice<X_MN, X_FLAT, KB, BM, BM / CN, MULTI, SHARED_X>(x, map_x, work.row0, (SHARED_X ? work.cn : c) * (BM / CN), step, bar, work.mask_x());
#pragma unroll
  for (int c = 0; c < (SHARED_Y ? 1 : CM); c++)
    load_slice<Y_MN, Y_FLAT, KB, BN, BN / CM, MULTI, SHARED_Y>(y, map_y, work.col0, (SHARED_Y ? work.cm : c) * (BN / CM), step, bar, work.mask_y());
}
