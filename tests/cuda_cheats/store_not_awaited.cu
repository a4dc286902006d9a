/* cuda-l2
target = "cuda"
arch = "sm_90a"

[[tensor_map]]
name = "map_a"
tensor = "a"
dims = ["k", "m"]
strides = ["2 * k"]
box = [16, 16]

[[tensor_map]]
name = "map_b"
tensor = "b"
dims = ["n", "k"]
strides = ["2 * n"]
box = [16, 16]

[[tensor_map]]
name = "map_c"
tensor = "c"
dims = ["n", "m"]
strides = ["2 * n"]
box = [16, 16]

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["map_a", "map_b", "map_c", "k"]
*/
/* Waits for TMA stores before its own, then ends while that may still read shared memory, and overwrites what it reads.
 * verify: full
 * expect: incorrect imprecise unhygienic crashed */
#include <cuda.h>
#include <cuda_fp16.h>

static __device__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

static __device__ void load(void *to, const CUtensorMap *map, int x, int y, unsigned bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4}], [%2];"
               :: "r"(shared_address(to)), "l"(map), "r"(bar), "r"(x), "r"(y) : "memory");
}

static __device__ void wait(unsigned bar, unsigned parity) {
  unsigned done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}

extern "C" __global__ void gemm(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                                const __grid_constant__ CUtensorMap map_c, int k) {
  __shared__ __align__(128) half ta[16][16], tb[16][16], tc[16][16];
  __shared__ __align__(8) unsigned long long barrier;
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 16, column = blockIdx.x * 16;
  const bool first = x + y == 0;
  const unsigned bar = shared_address(&barrier);
  if (first) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  float sum = 0.0f;
  unsigned parity = 0;
  for (int p = 0; p < k; p += 16) {
    if (first) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 1024;" :: "r"(bar) : "memory");
      load(ta, &map_a, p, row, bar);
      load(tb, &map_b, column, p, bar);
    }
    wait(bar, parity);
    parity ^= 1;
    for (int i = 0; i < 16; i++) sum += __half2float(ta[y][i]) * __half2float(tb[i][x]);
    __syncthreads();
  }
  tc[y][x] = __float2half(sum);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (first) {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 :: "l"(&map_c), "r"(shared_address(tc)), "r"(column), "r"(row) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  ((volatile unsigned short *)tc)[y * 16 + x] = 0;
}
