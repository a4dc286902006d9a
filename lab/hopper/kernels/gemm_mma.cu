// C = A B for small outputs and short K, by mma.sync with fragments loaded straight from global memory: no shared-memory
// staging, no tensor map, no barrier before the first multiply. fp16 in and out, fp32 accumulation. B is [N, K].
//
// A warp computes 16 MI x 8 NJ of C over K / WK. The block is WM x WN x WK warps; WK warps share a tile and split K in
// interleaved chunks of 32 KS, then add up through shared memory.
// Fragment layout: mma may see any permutation of K as long as A and B agree, so thread t of a quad reads 8 neighbouring
// elements (16 bytes) of a row and uses them as its k columns of two mma; likewise column j of B's fragment g is C's column
// g * NJ + j, which leaves each thread 2 NJ neighbouring columns of C to store.
#include "ptx.cuh"

#ifndef MI
#define MI 1
#endif
#ifndef NJ
#define NJ 2
#endif
#ifndef KS         // k32 blocks a warp loads at once
#define KS 2
#endif
#ifndef WM
#define WM 1
#endif
#ifndef WN
#define WN 1
#endif
#ifndef WK
#define WK 1
#endif
#ifndef ONCE       // K = 32 KS WK exactly: no loop
#define ONCE 0
#endif

constexpr int NT = WM * WN * WK * 32, R = MI * NJ * 4, RW = R / WK;
static_assert(WK == 1 || RW >= 2, "every warp of a K split stores something");

DEV void mma(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(NT)
gemm(const half* __restrict__ A, const half* __restrict__ B, half* __restrict__ C, int M, int N, int K, int pdl) {
  if (pdl == 0) pdl_trigger();
  const int lane = threadIdx.x & 31, w = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int wk = w % WK, wn = (w / WK) % WN, wm = w / WK / WN;
  const int m0 = (blockIdx.y * WM + wm) * 16 * MI, n0 = (blockIdx.x * WN + wn) * 8 * NJ;
  const half* pa = A + (m0 + g) * K + wk * (KS * 32) + t * 8;  // these kernels serve operands far below 2^31 elements
  const half* pb = B + (n0 + g * NJ) * K + wk * (KS * 32) + t * 8;
  float acc[MI][NJ][4] = {};
  pdl_wait();
#pragma unroll 1
  for (int k = 0; k < K; k += WK * KS * 32) {
    uint4 a[KS][MI][2], b[KS][NJ];
#pragma unroll
    for (int s = 0; s < KS; s++) {
#pragma unroll
      for (int i = 0; i < MI; i++) {
        a[s][i][0] = __ldg((const uint4*)(pa + i * 16 * K + s * 32));
        a[s][i][1] = __ldg((const uint4*)(pa + (i * 16 + 8) * K + s * 32));
      }
#pragma unroll
      for (int j = 0; j < NJ; j++) b[s][j] = __ldg((const uint4*)(pb + j * K + s * 32));
    }
#pragma unroll
    for (int s = 0; s < KS; s++)
#pragma unroll
      for (int i = 0; i < MI; i++)
#pragma unroll
        for (int j = 0; j < NJ; j++) {
          mma(acc[i][j], a[s][i][0].x, a[s][i][1].x, a[s][i][0].y, a[s][i][1].y, b[s][j].x, b[s][j].y);
          mma(acc[i][j], a[s][i][0].z, a[s][i][1].z, a[s][i][0].w, a[s][i][1].w, b[s][j].z, b[s][j].w);
        }
    if (ONCE) break;
    pa += WK * KS * 32; pb += WK * KS * 32;
  }
  if (pdl == 1) pdl_trigger();
  // sums in store order: v[((i * 2 + h) * 2 + c) * NJ + j] is row i * 16 + h * 8 + g, column (2 t + c) * NJ + j
  float v[R];
#pragma unroll
  for (int x = 0; x < R; x++) v[x] = acc[x / NJ / 4][x % NJ][(x / NJ / 2) % 2 * 2 + (x / NJ) % 2];
  if constexpr (WK == 1) {
#pragma unroll
    for (int r = 0; r < 2 * MI; r++) {
      half* p = C + (m0 + r * 8 + g) * N + n0 + 2 * t * NJ;
      const float* f = v + r * 2 * NJ;
      if constexpr (NJ == 1) *(uint32_t*)p = pack2(f[0], f[1]);
      else if constexpr (NJ == 2) *(uint2*)p = make_uint2(pack2(f[0], f[1]), pack2(f[2], f[3]));
      else
#pragma unroll
        for (int i = 0; i < 2 * NJ; i += 8) *(uint4*)(p + i) = make_uint4(pack2(f[i], f[i + 1]), pack2(f[i + 2], f[i + 3]), pack2(f[i + 4], f[i + 5]), pack2(f[i + 6], f[i + 7]));
    }
  } else {
    // Warp wk ends up with v[wk * RW, (wk + 1) * RW): vectors of V floats, lane-interleaved, so that no bank is hit twice.
    constexpr int V = RW >= 4 ? 4 : 2;
    __shared__ float4 shared[WM * WN * WK * R * 32 / 4];
    float* q = (float*)shared + (w / WK) * (WK * R * 32);
#pragma unroll
    for (int x = 0; x < R; x += V) {
      float* p = q + (wk * R + x) * 32 + lane * V;
      if constexpr (V == 4) *(float4*)p = make_float4(v[x], v[x + 1], v[x + 2], v[x + 3]); else *(float2*)p = make_float2(v[x], v[x + 1]);
    }
    if (WM * WN == 1) __syncthreads(); else named_sync(w / WK + 1, WK * 32);
    float o[RW] = {};
#pragma unroll
    for (int s = 0; s < WK; s++)
#pragma unroll
      for (int x = 0; x < RW; x += V) {
        const float* p = q + (s * R + wk * RW + x) * 32 + lane * V;
        if constexpr (V == 4) { const float4 f = *(const float4*)p; o[x] += f.x; o[x + 1] += f.y; o[x + 2] += f.z; o[x + 3] += f.w; }
        else { const float2 f = *(const float2*)p; o[x] += f.x; o[x + 1] += f.y; }
      }
    constexpr int W = RW < 2 * NJ ? RW : 2 * NJ;  // neighbouring columns a store covers
#pragma unroll
    for (int x = 0; x < RW; x += W) {
      const int y = wk * RW + x, r = y / (2 * NJ), c = y % (2 * NJ);
      half* p = C + (m0 + r * 8 + g) * N + n0 + 2 * t * NJ + c;
      if constexpr (W == 2) *(uint32_t*)p = pack2(o[x], o[x + 1]);
      else if constexpr (W == 4) *(uint2*)p = make_uint2(pack2(o[x], o[x + 1]), pack2(o[x + 2], o[x + 3]));
      else
#pragma unroll
        for (int i = 0; i < W; i += 8) *(uint4*)(p + i) = make_uint4(pack2(o[x + i], o[x + i + 1]), pack2(o[x + i + 2], o[x + i + 3]), pack2(o[x + i + 4], o[x + i + 5]), pack2(o[x + i + 6], o[x + i + 7]));
    }
  }
}
