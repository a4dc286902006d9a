#pragma once
          const int phase = phase_of(col0), begin = K * phase & ~7;
#pragma unroll
          for (int u = 0; u < KB; u++) {
            const int k = ((k0 + i) * KB + u) * 64;
            tma_load(x + u * BM * 128, &map_x, k, row0, phase, bar);
            tma_load(x + X_BYTES + u * BN * 128, &map_y, begin + k, col0 & 0xfffff, 0, bar);
          }
