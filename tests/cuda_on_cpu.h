/* Enough of CUDA to run the GPU families of tasks on a CPU, slowly: a fiber a thread, a system thread a block of a cluster.
 *
 * Shows that indices, reductions and edges are right and where a thread leaves its memory. It does not show races: fibers
 * change hands only where threads meet. What hardware approximates is off here by as much as it may be there. */
#pragma once
#define CUDA_ON_CPU 1
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <barrier>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __restrict__

struct Three { unsigned x, y, z; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static thread_local Three threadIdx, blockIdx;
static Three blockDim, gridDim;

/* A block that runs: fibers take turns wherever one waits for others. Beyond its beginning a fiber is entered by longjmp:
 * swapcontext calls the system each time. */
struct Fiber {
  ucontext_t context;
  jmp_buf left;
  Three index;
  bool begun, done;
};
static const size_t STACK_BYTES = 1 << 16;
static std::vector<std::unique_ptr<char[]>> stacks; /* kept from launch to launch: the fibers' of each block of a cluster */
struct Meeting { unsigned arrived, generation; };
static const unsigned CLUSTER_SLOT = 33, BLOCK_SLOT = 32;
struct Block {
  std::vector<Fiber> fibers;
  ucontext_t home;
  unsigned current, alive, rank;
  std::vector<Meeting> meetings; /* a warp each, then the block's */
  std::vector<unsigned> exchanged; /* a word a thread */
  std::vector<char> dynamic;
};
static thread_local Block *block;
static std::barrier<> *cluster_barrier;
static thread_local char anchor; /* thread-local variables of this library lie at the same distance in every thread */
static std::vector<char *> anchors;

static inline void enter_next(Block &b) {
  do b.current = (b.current + 1) % b.fibers.size();
  while (b.fibers[b.current].done);
  Fiber &next = b.fibers[b.current];
  threadIdx = next.index;
  if (next.begun) _longjmp(next.left, 1);
  next.begun = true;
  setcontext(&next.context);
}
static inline void next_fiber() {
  if (block->alive > 1 && !_setjmp(block->fibers[block->current].left)) enter_next(*block);
}
static inline void meet(Meeting &m, unsigned count) {
  const unsigned generation = m.generation;
  if (++m.arrived == count) { m.arrived = 0, m.generation++; return; }
  for (unsigned turns = 0; m.generation == generation; turns++) {
    if (turns > 20000) abort(); /* not all of them came */
    next_fiber();
  }
}
static inline unsigned warp() { return block->current / 32; }
static inline unsigned warp_threads() { return std::min<unsigned>(32, block->fibers.size() - warp() * 32); }
static inline void __syncwarp(unsigned = ~0u) { meet(block->meetings[warp()], warp_threads()); }
static inline void __syncthreads() { meet(block->meetings[block->meetings.size() - 2], block->fibers.size()); }
template <typename T> static inline T __shfl_xor_sync(unsigned, T value, int mask) {
  static_assert(sizeof(T) == 4);
  memcpy(&block->exchanged[block->current], &value, 4);
  __syncwarp();
  memcpy(&value, &block->exchanged[block->current ^ mask], 4);
  __syncwarp();
  return value;
}
template <typename T> static inline T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  static_assert(sizeof(T) == 4);
  memcpy(&block->exchanged[block->current], &value, 4);
  __syncwarp();
  memcpy(&value, &block->exchanged[block->current / width * width + lane % width], 4);
  __syncwarp();
  return value;
}
static inline int __syncthreads_or(int predicate) {
  static thread_local int any;
  if (block->current == 0) any = 0;
  __syncthreads();
  any |= predicate != 0;
  __syncthreads();
  const int result = any;
  __syncthreads();
  return result;
}
static inline unsigned atomicInc(unsigned *p, unsigned most) { const unsigned old = *p; *p = old >= most ? 0 : old + 1; return old; }
template <typename T> static inline T atomicAdd(T *p, T value) { const T old = *p; *p += value; return old; }
static inline void __threadfence() {}
template <typename T> static inline T __ldg(const T *p) { return *p; }
template <typename T> static inline T __ldcs(const T *p) { return *p; }
template <typename T> static inline T __ldcg(const T *p) { return *p; }
template <typename T> static inline void __stcs(T *p, T value) { *p = value; }
template <typename T> static inline void __stcg(T *p, T value) { *p = value; }
static inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
static inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }

/* Off by so much of itself, up or down by its own bits. */
static inline float off(float exact, float share = 0x1p-22f) {
  return exact * ((__float_as_int(exact) * 0x9E3779B9u >> 31) ? 1 + share : 1 - share);
}
/* Within 2 units in the last place on a GPU (CUDA C++ Programming Guide, mathematical functions). */
#define OFF(function) static inline float cuda_##function(float x) { return off(function(x), 0x1p-23f); }
OFF(expf) OFF(logf) OFF(log1pf)
static inline float cuda_erff(float x) { return isinf(x) ? erff(x) : off(erff(x), 0x1p-23f); } /* of infinity exactly 1 */
#define expf(x) ((x) == 0 ? 1 : cuda_expf(x))
#define erff cuda_erff
#define logf(x) ((x) == 1 ? 0 : cuda_logf(x))
#define log1pf cuda_log1pf
static inline float rsqrtf(float x) { return off((float)(1 / sqrt((double)x)), 0x1p-23f); }
static inline float quick_exp2(float x) { return x == 0 ? 1 : off(exp2f(x)); } /* PTX: 2^0 is 1 */
static inline float __fdividef(float x, float y) { return fabsf(y) > 0x1p126f ? (isinf(x) && isinf(y) ? NAN : x * 0) : off(x / y); }
template <typename T> static inline T read_around(const T *p) { return *p; }
template <int BYTES> static inline void copy(void *shared, const void *global) { memcpy(shared, global, BYTES); }
static inline void copied() {}
static inline unsigned cluster_rank() { return block->rank; }
static inline void cluster_arrive() {}
static inline void cluster_wait() {
  Meeting &m = block->meetings.back();
  const unsigned generation = m.generation;
  if (m.arrived + 1 == block->fibers.size()) cluster_barrier->arrive_and_wait();
  (void)generation;
  meet(m, block->fibers.size());
}
static inline void cluster_store(void *shared, unsigned rank, unsigned word) {
  char *at = (char *)shared - &anchor + anchors[rank];
  memcpy(at, &word, 4);
}

/* Types of 16 bits. */
static inline uint32_t bits_of(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
static inline float float_of(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
struct __half { _Float16 value; };
static inline float __half2float(__half x) { return (float)x.value; }
static inline __half __float2half_rn(float x) { return {(_Float16)x}; }
static inline __half __float2half(float x) { return __float2half_rn(x); }
struct __nv_bfloat16 { uint16_t bits; };
static inline float __bfloat162float(__nv_bfloat16 x) { return float_of((uint32_t)x.bits << 16); }
static inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t b = bits_of(x);
  if (x != x) return {(uint16_t)(b >> 16 | 64)};
  return {(uint16_t)((b + 0x7FFF + (b >> 16 & 1)) >> 16)};
}

/* Tensor cores: a warp's fragments meet in one place. */
struct Fragments { unsigned a[32][4], b[32][2]; const void *rows[32]; };
static thread_local Fragments fragments[32];
static inline void copy_or_zero(void *shared, const void *global, bool some) {
  if (some) memcpy(shared, global, 16);
  else memset(shared, 0, 16);
}
static inline void load_matrices_as(unsigned (&r)[4], const void *row, bool transposed) {
  Fragments &f = fragments[warp()];
  const unsigned lane = block->current % 32;
  f.rows[lane] = row;
  __syncwarp();
  for (unsigned i = 0; i < 4; i++) {
    uint16_t two[2];
    for (unsigned j = 0; j < 2; j++) {
      const unsigned down = transposed ? lane % 4 * 2 + j : lane / 4, across = transposed ? lane / 4 : lane % 4 * 2 + j;
      memcpy(&two[j], (const char *)f.rows[i * 8 + down] + 2 * across, 2);
    }
    memcpy(&r[i], two, 4);
  }
  __syncwarp();
}
static inline void load_matrices(unsigned (&r)[4], const void *row) { load_matrices_as(r, row, false); }
static inline void load_transposed(unsigned (&r)[4], const void *row) { load_matrices_as(r, row, true); }
static inline float sixteen_bits(uint16_t bits) {
#if DTYPE == 17
  return float_of((uint32_t)bits << 16);
#else
  _Float16 x;
  memcpy(&x, &bits, 2);
  return (float)x;
#endif
}
static inline void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  Fragments &f = fragments[warp()];
  const unsigned lane = block->current % 32, group = lane / 4;
  memcpy(f.a[lane], a, 16);
  f.b[lane][0] = b0, f.b[lane][1] = b1;
  __syncwarp();
  for (unsigned i = 0; i < 4; i++)
    for (unsigned k = 0; k < 16; k++) { /* PTX ISA, fragments of mma.m16n8k16 */
      const unsigned column = lane % 4 * 2 + i % 2;
      const unsigned of_a = f.a[group * 4 + k % 8 / 2][i / 2 + k / 8 * 2], of_b = f.b[column * 4 + k % 8 / 2][k / 8];
      d[i] += sixteen_bits(of_a >> k % 2 * 16) * sixteen_bits(of_b >> k % 2 * 16);
    }
  __syncwarp();
}

/* One launch: arguments as the driver takes them, a pointer to each. */
template <typename... A, size_t... I> static void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
  kernel(*(std::remove_cv_t<A> *)arguments[I]...);
}
static void (*body)(void **);
static void **given;
static void begin() {
  body(given);
  Block &b = *block;
  b.fibers[b.current].done = true;
  if (--b.alive == 0) setcontext(&b.home);
  enter_next(b);
}
static void run_block(Block &b, Three index, unsigned rank) {
  block = &b, blockIdx = index, b.rank = rank;
  b.alive = b.fibers.size(), b.current = 0;
  b.meetings.assign(b.fibers.size() / 32 + 3, Meeting{});
  b.exchanged.resize((b.fibers.size() + 31) / 32 * 32);
  for (unsigned i = 0; i < b.fibers.size(); i++) {
    Fiber &f = b.fibers[i];
    f.begun = f.done = false;
    f.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks[rank * b.fibers.size() + i].get(), f.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&f.context, begin, 0);
  }
  threadIdx = b.fibers[0].index;
  b.fibers[0].begun = true;
  swapcontext(&b.home, &b.fibers[0].context);
}
static thread_local char *dynamic_shared_memory;
static void launch(Three grid, Three threads, unsigned cluster, size_t shared_bytes) {
  gridDim = grid, blockDim = threads;
  std::vector<Block> blocks(cluster);
  for (Block &b : blocks) b.fibers.resize(threads.x * threads.y * threads.z), b.dynamic.resize(shared_bytes + 16);
  while (stacks.size() < cluster * blocks[0].fibers.size()) stacks.push_back(std::make_unique_for_overwrite<char[]>(STACK_BYTES));
  std::barrier<> meeting(cluster);
  cluster_barrier = &meeting;
  anchors.assign(cluster, 0);
  const uint64_t clusters = (uint64_t)grid.x * grid.y * grid.z / cluster;
  std::vector<std::jthread> workers;
  for (unsigned rank = 0; rank < cluster; rank++)
    workers.emplace_back([&, rank] {
      anchors[rank] = &anchor;
      dynamic_shared_memory = (char *)(((uintptr_t)blocks[rank].dynamic.data() + 15) & ~(uintptr_t)15);
      meeting.arrive_and_wait();
      for (uint64_t i = 0; i < clusters; i++) {
        const uint64_t at = i * cluster + rank;
        run_block(blocks[rank], {(unsigned)(at % grid.x), (unsigned)(at / grid.x % grid.y), (unsigned)(at / grid.x / grid.y)}, rank);
        meeting.arrive_and_wait();
      }
    });
}
#define DYNAMIC_SHARED(name) char *name = dynamic_shared_memory
template <typename... A> static void call_all(void (*kernel)(A...), void **arguments) {
  call(kernel, arguments, std::index_sequence_for<A...>{});
}
#define KERNEL(name) \
  extern "C" void run_##name(const unsigned *sizes, unsigned cluster, size_t shared_bytes, void **arguments) { \
    given = arguments; \
    body = [](void **a) { call_all(name, a); }; \
    launch({sizes[0], sizes[1], sizes[2]}, {sizes[3], sizes[4], sizes[5]}, cluster, shared_bytes); \
  }
