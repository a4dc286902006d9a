// The runtime's own kernels: what an empty launch costs, a producer that is slow on purpose, a load beside the
// candidate, what it finds in shared memory, what memory around a launch holds, how far timed results are off.

constexpr int SPOILT_REGISTERS = 48;  // of the 64 that a thread of 1024 has; the others hold addresses and counts

__device__ unsigned long long now_ns() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

extern "C" __global__ void empty() {}

// Lets the next kernel begin at once, then takes its time to write the words it is there to produce: a dependent
// kernel that does not wait reads the old ones.
extern "C" __global__ void slow_copy(const uint4 *from, uint4 *to, unsigned long long words, unsigned long long ns) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const unsigned long long start = now_ns();
  while (now_ns() - start < ns) __nanosleep(200);
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) to[i] = from[i];
}

// Lets the next kernel begin at once and ends after the kernel ahead of it: what a chain of dependents has in between.
extern "C" __global__ void relay() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Holds the multiprocessors it runs on for a while; with traffic, so many words of it, by reading and writing them over
// and over: then caches lose what they held and copies of other kernels arrive late. More words than threads.
extern "C" __global__ void occupy(unsigned long long ns, uint4 *traffic, unsigned long long words) {
  extern __shared__ char held[];
  const unsigned long long start = now_ns(), threads = (unsigned long long)gridDim.x * blockDim.x;
  unsigned long long at = blockIdx.x * blockDim.x + threadIdx.x;
  while (now_ns() - start < ns) {
    if (words == 0) __nanosleep(1000);
    for (int i = 0; i < 16 && words != 0; i++) {
      uint4 word = __ldcg(traffic + at);
      word.x++;
      __stcg(traffic + at, word);
      at += threads;
      if (at >= words) at -= words;
    }
  }
  if (ns == 0) held[threadIdx.x] = 0;
}

// Fills its shared memory: the next block to use the multiprocessor finds that word there.
__device__ unsigned fill_shared(unsigned word, unsigned long long bytes) {
  extern __shared__ char held[];
  const unsigned first = (unsigned)__cvta_generic_to_shared(held);
  for (unsigned i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(first + i), "r"(word) : "memory");
  return first;
}
extern "C" __global__ void spoil_behind(unsigned long long word, unsigned long long bytes) { fill_shared((unsigned)word, bytes); }

// The same with nearly all registers, of 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) spoil_shared(unsigned long long word, unsigned long long bytes) {
  const unsigned first = fill_shared((unsigned)word, bytes);
  __syncthreads();
  unsigned registers[SPOILT_REGISTERS];  // loaded all of them before the first is stored
#pragma unroll
  for (int i = 0; i < SPOILT_REGISTERS; i++)
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(registers[i]) : "r"(first + 4 * threadIdx.x + 4 * i));
#pragma unroll
  for (int i = 0; i < SPOILT_REGISTERS; i++)
    asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(first + 4 * threadIdx.x + 4 * i), "r"(registers[i]));
}

// Fills BYTES of local memory of each thread, of as many threads as a multiprocessor can have. x: a 32-bit word; were
// there more, an element would be read, which the compiler cannot rule out.
template <int BYTES>
__device__ void fill_local(unsigned long long x) {
  unsigned local[BYTES / 4];
#pragma unroll 1
  for (int i = 0; i < BYTES / 4; i++) local[i] = (unsigned)x;
  if (x >> 32 && local[x >> 32] != (unsigned)x) __trap();
}
#define SPOIL_LOCAL(BYTES) \
  extern "C" __global__ void __launch_bounds__(1024, 2) spoil_local_##BYTES(unsigned long long x) { fill_local<BYTES>(x); }
SPOIL_LOCAL(256)
SPOIL_LOCAL(512)
SPOIL_LOCAL(1024)
SPOIL_LOCAL(2048)
SPOIL_LOCAL(4096)
SPOIL_LOCAL(8192)
SPOIL_LOCAL(16384)

// Launched several times in a row as programmatic dependents: see Helpers.settle.
extern "C" __global__ void settle() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Pieces of memory, 2-byte aligned: each has another piece's bytes, or where that is null a repeated word's.
constexpr unsigned MAX_SEGMENTS = 64;
struct Segments {
  unsigned char *at[MAX_SEGMENTS];
  const unsigned char *source[MAX_SEGMENTS];
  unsigned long long bytes[MAX_SEGMENTS];
  unsigned word[MAX_SEGMENTS];
};

__device__ bool aligned(const void *x, const void *y) { return (((unsigned long long)x | (unsigned long long)y) & 15) == 0; }

// One row of blocks a segment.
extern "C" __global__ void fill_segments(const __grid_constant__ Segments segments) {
  const unsigned each = blockIdx.y, word = segments.word[each];
  unsigned char *at = segments.at[each];
  const unsigned char *source = segments.source[each];
  const unsigned long long bytes = segments.bytes[each], step = (unsigned long long)gridDim.x * blockDim.x;
  const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned long long wide = aligned(at, source) ? bytes / 16 : 0;
  for (unsigned long long i = first; i < wide; i += step)
    ((uint4 *)at)[i] = source ? ((const uint4 *)source)[i] : make_uint4(word, word, word, word);
  for (unsigned long long i = 16 * wide + first; i < bytes; i += step)
    at[i] = source ? source[i] : (unsigned char)(word >> 8 * (i % 4));
}

// One row of blocks a segment: found[i] becomes 1 where it holds anything else. One more row copies bytes, aligned to 16
// on both sides, and says in the last word of found whether a 16-bit word is among them.
extern "C" __global__ void look_at_segments(const __grid_constant__ Segments segments, const uint4 *from,
                                            unsigned long long copied, unsigned long long word, uint4 *to, int *found) {
  const unsigned each = blockIdx.y;
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  bool differs = false;
  if (each == gridDim.y - 1) {
    const auto among = [&](unsigned x) { return (x & 0xffff) == word || x >> 16 == word; };
    for (unsigned long long i = first; i < copied / 16; i += step) {
      const uint4 x = __ldcg(from + i);
      differs |= among(x.x) || among(x.y) || among(x.z) || among(x.w);
      to[i] = x;
    }
    for (unsigned long long i = copied / 16 * 8 + first; i < copied / 2; i += step) {
      const unsigned short x = __ldcg((const unsigned short *)from + i);
      differs |= x == word;
      ((unsigned short *)to)[i] = x;
    }
    if (differs) found[MAX_SEGMENTS] = 1;
    return;
  }
  const unsigned wanted = segments.word[each];
  const unsigned char *at = segments.at[each], *source = segments.source[each];
  const unsigned long long bytes = segments.bytes[each], wide = aligned(at, source) ? bytes / 16 : 0;
  for (unsigned long long i = first; i < wide; i += step) {
    const uint4 x = __ldcg((const uint4 *)at + i), y = source ? __ldcg((const uint4 *)source + i) : make_uint4(wanted, wanted, wanted, wanted);
    differs |= x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w;
  }
  for (unsigned long long i = 16 * wide + first; i < bytes; i += step)
    differs |= __ldcg(at + i) != (source ? __ldcg(source + i) : (unsigned char)(wanted >> 8 * (i % 4)));
  if (differs) found[each] = 1;
}

// A number of 16 bits: of fp16, or of bf16, which is the upper half of an fp32 one.
__device__ float widened(unsigned short x, bool bf16) {
  if (bf16) return __uint_as_float((unsigned)x << 16);
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ float of_warp(float x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

// Calls use(column, value) for what falls to this lane of a row of fp16 or bf16.
template <class Use>
__device__ void for_each_of_row(const unsigned short *row, unsigned long long columns, bool bf16, Use use) {
  const unsigned lane = threadIdx.x % 32;
  if (columns % 8 == 0 && aligned(row, row)) {
#pragma unroll 2
    for (unsigned long long i = lane * 8; i < columns; i += 256) {
      const uint4 x = __ldcg((const uint4 *)(row + i));
      const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 8; j++) use(i + j, widened(words[j / 2] >> 16 * (j % 2), bf16));
    }
  } else {
    for (unsigned long long i = lane; i < columns; i += 32) use(i, widened(__ldcg(row + i), bf16));
  }
}

// A warp's sum of squares, and the largest; of what is no number, none. Not negative, their order is that of their bits.
__device__ void add_to(float *found, float squares, float largest) {
  if (threadIdx.x % 32 != 0) return;
  atomicAdd(found, squares);
  atomicMax((unsigned *)found + 1, __float_as_uint(largest));
}
__device__ float larger(float x, float y) { return __uint_as_float(max(__float_as_uint(x), __float_as_uint(y))); }

// Rows of several C times signs against what is expected, in units of what rounding and the order of sums may change:
// rounding times a row's norm, and summation; both are the bits of a double. One row of blocks a C. at: of each the
// addresses of C and of what is expected. found: four words each, of which the first two become the sum of squares and
// the largest.
extern "C" __global__ void look_at_rows(const unsigned long long *at, unsigned long long rows,
                                        unsigned long long columns, long long bf16, const float *signs,
                                        long long rounding, long long summation, float *found) {
  const unsigned short *c = (const unsigned short *)at[2 * blockIdx.y];
  const float *expected = (const float *)at[2 * blockIdx.y + 1];
  const float by_norm = (float)__longlong_as_double(rounding), at_least = (float)__longlong_as_double(summation);
  float squares = 0, largest = 0;
  for (unsigned long long row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += gridDim.x * (blockDim.x / 32)) {
    float sum = 0, norm = 0;
    for_each_of_row(c + row * columns, columns, bf16, [&](unsigned long long i, float x) {
      sum += x * __ldg(signs + i);
      norm += x * x;
    });
    const float off = fabsf(of_warp(sum) - __ldg(expected + row)) / (by_norm * sqrtf(of_warp(norm)) + at_least);
    squares += off * off;
    largest = larger(largest, off);
  }
  add_to(found + 4 * blockIdx.y, squares, largest);
}

// Rows of C, by their numbers, against fp32 ones. found: sum of squared differences, and the largest.
extern "C" __global__ void compare_rows(const unsigned short *c, unsigned long long count, unsigned long long columns,
                                        long long bf16, const long long *numbers, const float *reference, float *found) {
  float squares = 0, largest = 0;
  for (unsigned long long row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < count; row += gridDim.x * (blockDim.x / 32))
    for_each_of_row(c + numbers[row] * columns, columns, bf16, [&](unsigned long long i, float x) {
      const float off = fabsf(x - __ldg(reference + row * columns + i));
      squares += off * off;
      largest = larger(largest, off);
    });
  squares = of_warp(squares);
  for (int lanes = 16; lanes > 0; lanes /= 2) largest = larger(largest, __shfl_xor_sync(~0u, largest, lanes));
  add_to(found, squares, largest);
}
