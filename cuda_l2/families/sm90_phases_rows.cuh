#pragma once
// In place of sm90_ragged_rows.cuh: 16 x W elements from shared memory to C, P columns apart.
template <int W, int V> DEV void store_rows(u16 *C, int M, int N, int row0, int col0, u32 stage, int lane) {
  const int P = col0 >> 24, phase = phase_of(col0), first = col0 & 0xfffff;
#pragma unroll 4
  for (int q = lane; q < 16 * W; q += 32) {
    const int line = q / W, e = q % W, row = row0 + line, column = (first + e) * P + phase;
    if (row < M && column < N) C[(u64)row * N + column] = ld_shared_u16(stage + line * PITCH + e * 2);
  }
}

