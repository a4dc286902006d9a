/* cuda-l2
target = "cuda"
arch = "sm_90a"

[[launch]]
kernel = "gemm"
grid = ["n / 8", "m / 64"]
block = [128]
args = ["a", "b", "c", "n", "k"]
*/
/* Sums in fp16 by Hopper's tensor cores.
 * expect: refused imprecise */
#include <cuda_fp16.h>

// A tile without swizzle, K-major: 8 x 16-byte matrices, 128 bytes apart along K and 256 along the other side.
static __device__ unsigned long long descriptor(const void *p) {
  const unsigned long long address = __cvta_generic_to_shared(p);
  return (address & 0x3ffff) >> 4 | 128ull >> 4 << 16 | 256ull >> 4 << 32;
}

// Four warps compute 64 x 8 of C. M must be a multiple of 64, N of 8, K of 16.
extern "C" __global__ void gemm(const half *a, const half *b, half *c, int n, int k) {
  __shared__ __align__(128) half ta[64 * 16], tb[8 * 16];
  const int i = threadIdx.x, row = blockIdx.y * 64, column = blockIdx.x * 8;
  unsigned d[2] = {};
  for (int p = 0; p < k; p += 16) {
    for (int j = i; j < 64 * 16; j += 128)
      ta[j] = a[(row + j / 128 * 8 + j % 64 / 8) * k + p + j % 128 / 64 * 8 + j % 8];
    tb[i] = b[(p + i / 64 * 8 + i % 8) * n + column + i % 64 / 8];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 "
                 "{%0, %1}, %2, %3, p, 1, 1, 0, 0; }"
                 : "+r"(d[0]), "+r"(d[1]) : "l"(descriptor(ta)), "l"(descriptor(tb)));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    __syncthreads();
  }
  half *out = c + (row + i / 32 * 16 + i % 32 / 4) * n + column + i % 4 * 2;
  *(unsigned *)out = d[0];
  *(unsigned *)(out + 8 * n) = d[1];
}
