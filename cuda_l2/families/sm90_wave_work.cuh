#pragma once
// Which tile of C, and which part of K, a block of sm90_wave.cu works on.
#include "sm90_wave_shape.cuh"

struct Work {
  int cm, cn, ck, sl;  // place in the cluster, and among the parts of K beyond it
  int row0, col0;      // of the tile, on the axes of X and Y
  int k0, n;           // steps of K: the first, and how many, at least 1

  // tile_x, tile_y: of the cluster, in cluster tiles.
  DEV Work(int tile_x, int tile_y, int K) {
    const int rank = CS > 1 ? blockIdx.x % CS : 0;
    cm = rank % CM, cn = (rank / CM) % CN, ck = rank / (CM * CN), sl = SL > 1 ? blockIdx.z : 0;
    row0 = (tile_x * CM + cm) * BM, col0 = (tile_y * CN + cn) * BN;
    const int part = sl * CK + ck, steps = (K + 64 * KB - 1) / (64 * KB), share = steps / (CK * SL), extra = steps % (CK * SL);
    k0 = part * share + least(part, extra), n = share + (part < extra ? 1 : 0);
  }
  // Blocks that get what this one loads of X, and of Y.
  DEV u16 mask_x() const { return (u16)((((1u << SHARING) - 1) / ((1u << CM) - 1)) << (cm + ck * SHARING)); }
  DEV u16 mask_y() const { return (u16)(((1u << CM) - 1) << (cn * CM + ck * SHARING)); }
};

// Tile row | tile column << 8 of cluster i, worked out by the contract: a lookup instead of integer divisions before the
// first load (0.1 to 0.2 us).
struct Order { u16 at[264]; };

// The order of tiles is the grid's where a grid can express it: a box of tiles lies along x, its rows first, and boxes lie
// along y and z. A whole column of tiles is a box, too (then z is 1), and so is a whole row (y is 1). A lookup reads one
// more line of parameters before the first load, which costs 1 to 2 % of a launch of 2.5 us. Where parts of K lie along z,
// a box is a column, or rows of tiles lie along y (box_rows 0), or a table says (box_columns 0), as for boxes of clusters.
DEV Work find_work(int box_rows, int box_log2, int box_columns, const Order *table, int K) {
  const int i = blockIdx.x / CS, z = SL > 1 ? 0 : blockIdx.z;
  if (TABLE && box_columns == 0) {
    const int tile = table->at[i];
    return Work(tile & 255, tile >> 8, K);
  }
  if (SL > 1 && box_rows == 0) return Work(blockIdx.y, i, K);
  return Work(z * box_rows + (i & (box_rows - 1)), blockIdx.y * box_columns + (i >> box_log2), K);
}
