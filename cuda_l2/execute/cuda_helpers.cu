// The runtime's own kernels: what an empty launch costs, a producer that is slow on purpose, a load beside the candidate.

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

// Holds the multiprocessors it runs on for a while.
extern "C" __global__ void occupy(unsigned long long ns) {
  extern __shared__ char held[];
  const unsigned long long start = now_ns();
  while (now_ns() - start < ns) __nanosleep(1000);
  if (ns == 0) held[threadIdx.x] = 0;
}

// Launched several times in a row as programmatic dependents: see Helpers.settle.
extern "C" __global__ void settle() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
