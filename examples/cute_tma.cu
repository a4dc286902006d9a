/* cuda-l2
target = "cuda"
arch = "sm_90a"
layouts = ["tn"]

[[tensor_map]]
name = "map_a"
tensor = "a"
dims = ["k", "m"]
strides = ["2 * k"]
box = [64, 128]
swizzle = "128B"

[[tensor_map]]
name = "map_b"
tensor = "b"
dims = ["k", "n"]
strides = ["2 * k"]
box = [64, 128]
swizzle = "128B"

[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 128)", "cdiv(m, 128)"]
block = [128]
shared_bytes = "3 * 2 * 128 * 64 * 2 + 1024"
args = ["map_a", "map_b", "c", "m", "n", "k"]
*/
// Example 3: the same machine as example 2 through CuTe's layouts and atoms; column-major B (tn), K a multiple of 8.
// The tensor maps come from the contract as they are: nothing here is built by a host function. One thread keeps two
// stages of loads ahead of the 128 threads that multiply.
#include <cuda.h>
#include <cute/tensor.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cutlass/arch/barrier.h>

using namespace cute;
using Barrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int STAGES = 3;
using Slice = Shape<_128, _64>;  // rows and depth of a stage of A, and of B

extern "C" __global__ void __launch_bounds__(128)
gemm(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, half_t *c, int m, int n, int k) {
  extern __shared__ char memory[];
  __shared__ alignas(8) uint64_t full[STAGES];
  half_t *ring = reinterpret_cast<half_t *>((reinterpret_cast<uintptr_t>(memory) + 1023) & ~uintptr_t(1023));
  constexpr int WORDS = 128 * 64;
  auto layout = tile_to_shape(GMMA::Layout_K_SW128_Atom<half_t>{}, Slice{});
  auto mma = make_tiled_mma(SM90_64x128x16_F32F16F16_SS<GMMA::Major::K, GMMA::Major::K>{});
  auto mine = mma.get_thread_slice(threadIdx.x);
  Tensor places = mine.partition_C(make_identity_tensor(Shape<_128, _128>{}));  // row and column of each of our sums
  Tensor sum = partition_fragment_C(mma, Shape<_128, _128>{});
  clear(sum);
  const int row0 = blockIdx.y * 128, column0 = blockIdx.x * 128, steps = (k + 63) / 64;
  auto load = [&](int step) {
    const int stage = step % STAGES;
    const auto hint = uint64_t(TMA::CacheHintSm90::EVICT_NORMAL);
    Barrier::arrive_and_expect_tx(&full[stage], 2 * WORDS * sizeof(half_t));
    SM90_TMA_LOAD_2D::copy(&map_a, &full[stage], hint, ring + 2 * stage * WORDS, step * 64, row0);
    SM90_TMA_LOAD_2D::copy(&map_b, &full[stage], hint, ring + (2 * stage + 1) * WORDS, step * 64, column0);
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) Barrier::init(&full[s], 1);
    cutlass::arch::fence_barrier_init();
    for (int step = 0; step < min(STAGES - 1, steps); step++) load(step);
  }
  __syncthreads();
  for (int step = 0; step < steps; step++) {
    const int stage = step % STAGES;
    if (threadIdx.x == 0 && step + STAGES - 1 < steps) load(step + STAGES - 1);
    Barrier::wait(&full[stage], step / STAGES & 1);
    Tensor a = mine.make_fragment_A(mine.partition_A(make_tensor(make_smem_ptr(ring + 2 * stage * WORDS), layout)));
    Tensor b = mine.make_fragment_B(mine.partition_B(make_tensor(make_smem_ptr(ring + (2 * stage + 1) * WORDS), layout)));
    warpgroup_fence_operand(sum);
    warpgroup_arrive();
    gemm(mma, a, b, sum);
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(sum);
    __syncthreads();  // the stage may be filled again
  }
  CUTE_UNROLL
  for (int i = 0; i < size(sum); i++) {
    const int row = row0 + get<0>(places(i)), column = column0 + get<1>(places(i));
    if (row < m && column < n) c[static_cast<long long>(row) * n + column] = half_t(sum(i));
  }
}
