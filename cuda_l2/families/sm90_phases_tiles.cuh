#pragma once
  const int P = phases(K), gm = (M + BM - 1) / BM, gn = (N / P + BN - 1) / BN * P, tiles = gm * gn;
  const int steps = (K + 7 + 64 * KB - 1) / (64 * KB), share = steps / CK, extra = steps % CK;
