#pragma once
  const int gm = (M + BM - 1) / BM, gn = (N + BN - 1) / BN, tiles = gm * gn;
  const int steps = (K + 64 * KB - 1) / (64 * KB), share = steps / CK, extra = steps % CK;
