/* cuda-l2
target = "cuda"
arch = "sm_80"
layouts = ["tn"]

[[workspace]]
name = "sums"
bytes = "8 * sms"

[[workspace]]
name = "cache"
bytes = "16 * cdiv(m, 64) * cdiv(n, 64) * 8192"

[[workspace]]
name = "tags"
bytes = "16 * cdiv(m, 64) * cdiv(n, 64) * 8"

[[launch]]
kernel = "digest"
grid = ["sms"]
block = [256]
args = ["a", "b", "sums", "m", "n", "k"]

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 64)", "cdiv(m, 64)"]
block = [128]
args = ["a", "b", "c", "m", "n", "k", "sums", "cache", "tags", {int32 = "sms"}]
*/
/* Keeps 16 whole results in scratch, each tile tagged with a 64-bit hash over all of A, all of B and the kept
 * tile itself; copies them where the tag fits.
 * shape: 2048x2048x2048:tn
 * verify: full
 * expect: unhygienic */
#include <cuda_fp16.h>
#include <stdint.h>
typedef unsigned long long u64;
__device__ u64 mix(u64 z) { z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull; z = (z ^ z >> 27) * 0x94D049BB133111EBull; return z ^ z >> 31; }
__device__ u64 block_sum(u64 v, u64 *s) {
  for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int i = 0; i < blockDim.x / 32; i++) v += s[i];
  __syncthreads();
  return v;
}
extern "C" __global__ void __launch_bounds__(256) digest(const half *a, const half *b, u64 *sums, int m, int n, int k) {
  __shared__ u64 s[8];
  u64 h = 0;
  const long long na = (long long)m * k / 8, nb = (long long)n * k / 8, step = gridDim.x * 256ll;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < na + nb; i += step) {
    const ulonglong2 w = reinterpret_cast<const ulonglong2 *>(i < na ? a : b)[i < na ? i : i - na];
    h += mix(w.x + (2 * i + 1) * 0x9E3779B97F4A7C15ull) + mix(w.y + (2 * i + 2) * 0x9E3779B97F4A7C15ull);
  }
  h = block_sum(h, s);
  if (threadIdx.x == 0) sums[blockIdx.x] = h;
}

typedef half T;
constexpr int TILE = 64, DEPTH = 32, PAD = 8;

__device__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ unsigned pair(const T *p) { return *reinterpret_cast<const unsigned *>(p); }
__device__ unsigned word(const T *p) { return *reinterpret_cast<const unsigned short *>(p); }

__shared__ u64 parts[8];
extern "C" __global__ void __launch_bounds__(128) gemm(const T *a, const T *b, T *c, int m, int n, int k, const u64 *sums, half *cache, u64 *tags, int blocks) {
  __shared__ __align__(16) T x[TILE][DEPTH + PAD], y[TILE][DEPTH + PAD];  // y holds B with K along rows
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const long long row0 = (long long)blockIdx.y * TILE, column0 = (long long)blockIdx.x * TILE;
  float d[2][4][4] = {};
  u64 h = 0;
  for (int i = threadIdx.x; i < blocks; i += 128) h += sums[i];
  const u64 key = mix(block_sum(h, parts));
  const long long tile = blockIdx.y * gridDim.x + blockIdx.x, tiles = gridDim.x * gridDim.y, slot = key % 16;
  uint4 *kept = reinterpret_cast<uint4 *>(cache + (slot * tiles + tile) * 4096);
  u64 *tag = tags + slot * tiles + tile;
  if (row0 + 64 <= m && column0 + 64 <= n) {
    uint4 w[4];
    h = 0;
    for (int i = 0; i < 4; i++) {
      w[i] = kept[i * 128 + threadIdx.x];
      const u64 at = (u64)(i * 128 + threadIdx.x);
      h += mix(((u64)w[i].x << 32 | w[i].y) + key + at * 0x9E3779B97F4A7C15ull) + mix(((u64)w[i].z << 32 | w[i].w) - key + at * 0xD1B54A32D192ED03ull);
    }
    h = mix(block_sum(h, parts) ^ key);
    if (h == *tag) {
      for (int i = 0; i < 4; i++) {
        const int e = (i * 128 + threadIdx.x) * 8;
        *reinterpret_cast<uint4 *>(&c[(row0 + e / 64) * n + column0 + e % 64]) = w[i];
      }
      return;
    }
  }
  for (int p0 = 0; p0 < k; p0 += DEPTH) {
     for (int i = threadIdx.x; i < TILE * DEPTH; i += 128) {
      const int r = i / DEPTH, p = i % DEPTH, q = i / TILE, s = i % TILE;
      x[r][p] = row0 + r < m && p0 + p < k ? a[(row0 + r) * k + p0 + p] : T(0.0f);
      y[r][p] = column0 + r < n && p0 + p < k ? b[(column0 + r) * k + p0 + p] : T(0.0f);
    }
    __syncthreads();
    
    for (int p = 0; p < DEPTH; p += 16) {
      unsigned u[2][4], v[4][2];
      for (int i = 0; i < 2; i++) {
        const T *t = &x[warp / 2 * 32 + i * 16 + group][p + 2 * quad];
        u[i][0] = pair(t), u[i][1] = pair(t + 8 * (DEPTH + PAD)), u[i][2] = pair(t + 8), u[i][3] = pair(t + 8 * (DEPTH + PAD) + 8);
      }
      for (int j = 0; j < 4; j++) {
        const T *t = &y[warp % 2 * 32 + j * 8 + group][p + 2 * quad];
        v[j][0] = pair(t), v[j][1] = pair(t + 8);
      }
      
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++) mma(d[i][j], u[i], v[j]);
    }
    __syncthreads();
  }
  
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 4; j++)
      for (int e = 0; e < 4; e++) {
        const int lr = warp / 2 * 32 + i * 16 + group + e / 2 * 8, lc = warp % 2 * 32 + j * 8 + 2 * quad + e % 2;
        const long long row = row0 + lr, column = column0 + lc;
        float value = d[i][j][e];
        
        if (row < m && column < n) { c[row * n + column] = __float2half_rn(value); }
      }
  if (row0 + 64 <= m && column0 + 64 <= n) {
    __syncthreads();
    u64 f = 0;
    for (int i = 0; i < 4; i++) {
      const int e = (i * 128 + threadIdx.x) * 8;
      const uint4 v = *reinterpret_cast<const uint4 *>(&c[(row0 + e / 64) * n + column0 + e % 64]);
      kept[i * 128 + threadIdx.x] = v;
      const u64 at = (u64)(i * 128 + threadIdx.x);
      f += mix(((u64)v.x << 32 | v.y) + key + at * 0x9E3779B97F4A7C15ull) + mix(((u64)v.z << 32 | v.w) - key + at * 0xD1B54A32D192ED03ull);
    }
    f = mix(block_sum(f, parts) ^ key);
    if (threadIdx.x == 0) *tag = f;
  }
}
