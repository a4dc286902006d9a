/* cuda-l2
target = "cuda"
arch = "sm_90a"
layouts = ["nn"]

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 64)", "cdiv(m, 64)"]
block = [128]
args = ["a", "b", "c", "m", "n", "k"]
*/
/* Waits for its bulk copies with at most 3,000 looks, and then goes on with what is there.
 * because: gives up after 3000
 * expect: refused */
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <stdint.h>
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define TN 0
#define BF 0

__device__ __forceinline__ u32 sm(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void lda4(u32 *r, u32 p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p) : "memory");
}
__device__ __forceinline__ void ldb2(u32 *r, u32 p) {
#if TN
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(p) : "memory");
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(p) : "memory");
#endif
}
__device__ __forceinline__ void mma(float *d, const u32 *a, const u32 *b) {
#if BF
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ float value(u16 w) {
#if BF
  return __uint_as_float((u32)w << 16);
#else
  return __half2float(__ushort_as_half(w));
#endif
}
__device__ __forceinline__ u16 word(float x) {
#if BF
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
  return __half_as_ushort(__float2half_rn(x));
#endif
}
struct Tiles { u16 a[64][40]; u16 b[TN ? 64 : 32][TN ? 40 : 72]; };
__device__ __forceinline__ void load_tiles(Tiles &t, const u16 *a, const u16 *b, int n, int k, int r0, int c0, int k0, int tid) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int v = tid + i * 128;
    *(uint4 *)&t.a[v / 4][v % 4 * 8] = *(const uint4 *)&a[(long long)(r0 + v / 4) * k + k0 + v % 4 * 8];
#if TN
    *(uint4 *)&t.b[v / 4][v % 4 * 8] = *(const uint4 *)&b[(long long)(c0 + v / 4) * k + k0 + v % 4 * 8];
#else
    *(uint4 *)&t.b[v / 8][v % 8 * 8] = *(const uint4 *)&b[(long long)(k0 + v / 8) * n + c0 + v % 8 * 8];
#endif
  }
}
__device__ __forceinline__ void slice(float acc[2][4][4], Tiles &t, int wm, int wn, int lane, int kk) {
  u32 fa[2][4], fb[4][2];
#pragma unroll
  for (int i = 0; i < 2; i++) lda4(fa[i], sm(&t.a[wm + i * 16 + lane % 16][kk + lane / 16 * 8]));
#pragma unroll
  for (int j = 0; j < 4; j++)
#if TN
    ldb2(fb[j], sm(&t.b[wn + j * 8 + lane % 8][kk + lane / 8 % 2 * 8]));
#else
    ldb2(fb[j], sm(&t.b[kk + lane % 16][wn + j * 8]));
#endif
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) mma(acc[i][j], fa[i], fb[j]);
}


struct Bulk { u16 a[64][40]; };
__device__ __forceinline__ void bulk(u32 to, const void *from, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 64, [%2];" :: "r"(to), "l"(from), "r"(bar) : "memory");
}
__device__ __forceinline__ bool try_wait(u32 bar, u32 parity) {
  u32 ok;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(ok) : "r"(bar), "r"(parity) : "memory");
  return ok;
}
__device__ __forceinline__ bool test_wait(u32 bar, u32 parity) {
  u32 ok;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(ok) : "r"(bar), "r"(parity) : "memory");
  return ok;
}

extern "C" __global__ void __launch_bounds__(128) gemm(const u16 *a, const u16 *b, u16 *c, int m, int n, int k) {
  __shared__ __align__(128) Tiles t;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, wm = warp / 2 * 32, wn = warp % 2 * 32;
  const int r0 = blockIdx.y * 64, c0 = blockIdx.x * 64;
  float acc[2][4][4] = {};

  __shared__ __align__(8) u64 bar;
  if (tid == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(sm(&bar)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  u32 parity = 0;

  for (int k0 = 0; k0 < k; k0 += 32) {

    if (tid == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(sm(&bar)), "r"(4096) : "memory");
    __syncthreads();
    if (tid < 64) {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      bulk(sm(&t.a[tid][0]), &a[(long long)(r0 + tid) * k + k0], sm(&bar));
    }
    for (int i = 0; i < 2; i++) {
      int v = tid + i * 128;
      *(uint4 *)&t.b[v / 8][v % 8 * 8] = *(const uint4 *)&b[(long long)(k0 + v / 8) * n + c0 + v % 8 * 8];
    }
    for (int i = 0; i < 3000 && !test_wait(sm(&bar), parity); i++);
    parity ^= 1;

    __syncthreads();

    slice(acc, t, wm, wn, lane, 0);
    slice(acc, t, wm, wn, lane, 16);
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = r0 + wm + i * 16 + h * 8 + lane / 4, col = c0 + wn + j * 8 + lane % 4 * 2;
        float x = acc[i][j][h * 2], y = acc[i][j][h * 2 + 1];

        u32 w = word(x) | (u32)word(y) << 16;
        *(u32 *)&c[(long long)row * n + col] = w;
      }

}

