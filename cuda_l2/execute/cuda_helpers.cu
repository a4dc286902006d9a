// The runtime's own kernels: what an empty launch costs, a producer that is slow on purpose, a load beside the
// candidate, what it finds in shared memory.

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
extern "C" __global__ void spoil_shared(unsigned long long word, unsigned long long bytes) {
  extern __shared__ char held[];
  const unsigned x = (unsigned)word, first = (unsigned)__cvta_generic_to_shared(held);
  for (unsigned i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(first + i), "r"(x) : "memory");
}

// Launched several times in a row as programmatic dependents: see Helpers.settle.
extern "C" __global__ void settle() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
