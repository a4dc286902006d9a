#pragma once
      // What the first and the last steps read of the rows beside these becomes zeros: zeros of A times a NaN are a NaN.
      {
        int row, column;
        place(t, row, column);
        const int first = (k0 + i) * 64 * KB - (K * phase_of(column) & 7);
        if (first < 0 || first + 64 * KB > K) {
#pragma unroll 1
          for (int q = tid; q < KB * BN * 8; q += NC) {
            const int line = q / 8, chunk = q % 8, at = first + line / BN * 64 + chunk * 8;
            const u32 to = ring + s * STAGE_BYTES + X_BYTES + line * 128 + ((chunk ^ (line & 7)) << 4);
#pragma unroll
            for (int e = 0; e < 8; e++)
              if (at + e < 0 || at + e >= K) asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + e * 2), "h"((u16)0) : "memory");
          }
          proxy_fence();
          named_sync(1, NC);
        }
      }
