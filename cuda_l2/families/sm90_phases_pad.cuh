#pragma once
// In place of sm90_ragged_pad.cuh. B is read where it lies. P = 8 / gcd(K, 8) of its rows, one after the other, are P K
// elements, a multiple of 16 bytes: a row of the tensor map. Row j P + p of B begins at element K p of row j, which lies K p mod 8
// elements behind a multiple of 16 bytes. The load begins there, and meets A moved by as many elements: phase p multiplies
// columns p, P + p, 2 P + p ... of C. Few rows of A make P copies cheap.
//
// A column of C is passed on as `j | p << 20 | P << 24`.
constexpr int PAD_THREADS = 256, PER_THREAD = 2;
DEV int phases(int K) { return K & 1 ? 8 : K & 2 ? 4 : 2; }
DEV int phase_of(int column) { return column >> 20 & 15; }

#include "sm90_ragged_chunk.cuh"
// `shifted` has P parts of `rows` rows of whole chunks: part p is A moved by length p mod 8 elements, between zeros.
extern "C" __global__ void __launch_bounds__(PAD_THREADS)
pad(const u16 *__restrict__ a, u16 *__restrict__ shifted, int rows, int length, u32 chunks) {
  pdl_trigger();
  pdl_wait();
  const u32 per_row = (length + 14) / 8;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const u32 chunk = (blockIdx.x * PER_THREAD + i) * PAD_THREADS + threadIdx.x, line = chunk / per_row;
    const int phase = line / rows, row = line - phase * rows, at = (int)(chunk - line * per_row) * 8 - (length * phase & 7);
    if (chunk < chunks) {
      const long long first = (long long)row * length;
      uint4 v;
      if (at >= 0 && at + 8 <= length) {
        v = unaligned_chunk(a, first + at, (long long)rows * length);
      } else {
        u32 w[4] = {};
#pragma unroll
        for (int e = 0; e < 8; e++)
          if (at + e >= 0 && at + e < length) w[e / 2] |= (u32)a[first + at + e] << e % 2 * 16;
        v = make_uint4(w[0], w[1], w[2], w[3]);
      }
      ((uint4 *)shifted)[chunk] = v;
    }
  }
}

