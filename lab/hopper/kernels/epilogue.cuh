// From wgmma fragments to C.
#pragma once
#include "ptx.cuh"

// A warp's 16 x W part of C: fragments through shared memory, so that global stores are 16 bytes and rows contiguous.
// (Storing fragments straight from registers, 4 bytes a thread, was 0.3 to 1.5 us slower on every shape tried.)
template <int W> DEV void store_rows(half* C, int ldc, const float* a, int row, int col, uint32_t stage, int lane) {
  constexpr int PITCH = W * 2 + 16, CHUNKS = W / 8, ALL = 16 * CHUNKS;
  static_assert(W % 8 == 0, "");
#pragma unroll
  for (int j = 0; j < W / 8; j += 2) {
    const uint32_t at = stage + (lane & 15) * PITCH + (j + (lane >> 4)) * 16;
    if (j + 1 < W / 8)
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(pack2(a[4 * j], a[4 * j + 1])), "r"(pack2(a[4 * j + 2], a[4 * j + 3])), "r"(pack2(a[4 * j + 4], a[4 * j + 5])), "r"(pack2(a[4 * j + 6], a[4 * j + 7])) : "memory");
    else
      asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" :: "r"(stage + (lane & 15) * PITCH + j * 16), "r"(pack2(a[4 * j], a[4 * j + 1])), "r"(pack2(a[4 * j + 2], a[4 * j + 3])) : "memory");
  }
  __syncwarp();
#pragma unroll
  for (int q = 0; q < (ALL + 31) / 32; q++) {
    const int i = q * 32 + lane, line = i / CHUNKS, c = i % CHUNKS;
    if (ALL % 32 == 0 || i < ALL) {
      uint4 v;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(stage + line * PITCH + c * 16) : "memory");
      *(uint4*)(C + (size_t)(row + line) * ldc + col + c * 8) = v;
    }
  }
  __syncwarp();
}
// The same for swapped operands: 16 columns x W rows of C.
template <int W> DEV void store_columns(half* C, int ldc, const float* a, int row, int col, uint32_t stage, int lane) {
  constexpr int PITCH = 48;  // 32 bytes of data; rows 48 bytes apart do not collide
#pragma unroll
  for (int j = 0; j < W / 8; j += 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" :: "r"(stage + ((j + (lane >> 4)) * 8 + (lane & 7)) * PITCH + ((lane >> 3) & 1) * 16), "r"(pack2(a[4 * j], a[4 * j + 1])), "r"(pack2(a[4 * j + 2], a[4 * j + 3])), "r"(pack2(a[4 * j + 4], a[4 * j + 5])), "r"(pack2(a[4 * j + 6], a[4 * j + 7])) : "memory");
  __syncwarp();
#pragma unroll
  for (int q = 0; q < W * 2 / 32; q++) {
    const int i = q * 32 + lane, line = i / 2, c = i % 2;
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(stage + line * PITCH + c * 16) : "memory");
    *(uint4*)(C + (size_t)(row + line) * ldc + col + c * 8) = v;
  }
  __syncwarp();
}

