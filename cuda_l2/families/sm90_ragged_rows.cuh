#pragma once
// 16 x W elements from shared memory to C, V at once.
template <int W, int V> DEV void store_rows(u16 *C, int M, int N, int row0, int col0, u32 stage, int lane) {
#pragma unroll 4
  for (int q = lane; q < 16 * W / V; q += 32) {
    const int line = q / (W / V), e = q % (W / V) * V, row = row0 + line, column = col0 + e;
    const u32 from = stage + line * PITCH + e * 2;
    u16 *to = C + (u64)row * N + column;
    if (row < M && column < N) {
      if constexpr (V == 8) {
        *(uint4 *)to = ld_shared(from);
      } else if constexpr (V == 2) {
        u32 v;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
        *(u32 *)to = v;
      } else {
        u16 v;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
        *to = v;
      }
    }
  }
}

