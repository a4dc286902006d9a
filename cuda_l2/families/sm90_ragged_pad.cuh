#pragma once
// ---- copies of operands
// Rows of `length` elements go to rows of whole chunks of 8 elements; a thread takes PER_THREAD chunks.
constexpr int PAD_THREADS = 256, PER_THREAD = 2;
struct Copied { const u16 *from; u16 *to; int rows, length; };

#include "sm90_ragged_chunk.cuh"
DEV void copy_chunk(const Copied &c, u32 chunk) {
  const u32 chunks = (c.length + 7) / 8, row = chunk / chunks;
  const long long at = (long long)row * c.length + (chunk - row * chunks) * 8;
  ((uint4 *)c.to)[chunk] = unaligned_chunk(c.from, at, (long long)c.rows * c.length);
}

// chunks_of_a, chunks: of A's copy, and of both; an operand that is not copied has none.
extern "C" __global__ void __launch_bounds__(PAD_THREADS)
pad(const u16 *__restrict__ a, u16 *__restrict__ padded_a, int a_rows, int a_length, const u16 *__restrict__ b,
    u16 *__restrict__ padded_b, int b_rows, int b_length, u32 chunks_of_a, u32 chunks) {
  pdl_trigger();
  pdl_wait();
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const u32 chunk = (blockIdx.x * PER_THREAD + i) * PAD_THREADS + threadIdx.x;
    if (chunk < chunks_of_a) copy_chunk({a, padded_a, a_rows, a_length}, chunk);
    else if (chunk < chunks) copy_chunk({b, padded_b, b_rows, b_length}, chunk - chunks_of_a);
  }
}

