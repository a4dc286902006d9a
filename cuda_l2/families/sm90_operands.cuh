#pragma once
// Operands in shared memory as wgmma reads them and TMA writes them, 128-byte swizzled. A tile is ROWS rows (of A, or
// columns of B) by BLOCKS blocks of 64 elements of K:
//   K-major   [BLOCKS][ROWS][64 elements of K]
//   MN-major  [ROWS / 64][BLOCKS * 64 elements of K][64 rows]     (row-major B)
// Tensor maps, innermost first: K-major (64, rows, k / 64), MN-major (64, k, rows / 64), so that one instruction loads a
// whole tile; FLAT where the inner size is no multiple of 64: (k, rows, 1) and (rows, k, 1), an instruction a block of 64.
// What lies outside the operand arrives as zeros.
#include "sm90_ptx.cuh"

// Loads SLICE rows from row r of the tile on. SHARED: into every block of the cluster in mask. PIECES: the map's box holds
// a slice of one block of K, as multicast needs it, and not the whole tile.
template <bool MN, bool FLAT, int BLOCKS, int ROWS, int SLICE, bool PIECES, bool SHARED>
DEV void load_slice(u32 tile, const TensorMap *map, int row, int r, int step, u32 bar, u16 mask) {
  auto load = [&](u32 dst, int x, int y, int z) {
    if (SHARED) tma_load_multicast(dst, map, x, y, z, bar, mask);
    else tma_load(dst, map, x, y, z, bar);
  };
  const int k = step * BLOCKS;  // in blocks of 64
  if constexpr (MN && FLAT) {
#pragma unroll
    for (int g = 0; g < SLICE / 64; g++) load(tile + (r / 64 + g) * (BLOCKS * 8192), row + r + g * 64, k * 64, 0);
  } else if constexpr (MN) {
    load(tile + r / 64 * (BLOCKS * 8192), 0, k * 64, (row + r) / 64);
  } else if constexpr (FLAT || PIECES) {
#pragma unroll
    for (int u = 0; u < BLOCKS; u++)
      load(tile + (u * ROWS + r) * 128, FLAT ? (k + u) * 64 : 0, row + r, FLAT ? 0 : k + u);
  } else {
    load(tile, 0, row, k);
  }
}

// What to add to a descriptor's low word for 16 elements of K (k16 of block u) and the 64-row slab.
template <bool MN, int BLOCKS, int ROWS> constexpr u32 operand_at(int slab, int u, int k16) {
  return (MN ? slab * BLOCKS * 8192 + (u * 4 + k16) * 2048 : (u * ROWS + slab * 64) * 128 + k16 * 32) / 16;
}
