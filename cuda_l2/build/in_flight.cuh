// What a watched stress build calls around wgmma: see in_flight.py. Per warp: groups committed, groups waited for, the
// group whose operand is watched (0: none), where that operand begins, and words of it as they were at the issue.

constexpr unsigned CUDA_L2_WARPS = 16, CUDA_L2_WORDS = 8, CUDA_L2_EACH = 4 * (4 + CUDA_L2_WORDS);
static __shared__ unsigned cuda_l2_watched[CUDA_L2_WARPS * CUDA_L2_EACH / 4];

static __device__ __forceinline__ unsigned cuda_l2_load(unsigned at) {
  unsigned x;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
  return x;
}
static __device__ __forceinline__ void cuda_l2_store(bool when, unsigned at, unsigned x) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.volatile.shared.u32 [%1], %2; }" ::"r"((unsigned)when),
               "r"(at), "r"(x));
}

struct cuda_l2_Warp {
  unsigned committed, waited, watched, place, words;  // addresses
  unsigned others;                                    // of the first warp's groups waited for, in this warpgroup
  unsigned lane, i;
  bool any, leads;

  __device__ __forceinline__ cuda_l2_Warp() {
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x, warp = thread / 32;
    any = warp < CUDA_L2_WARPS, leads = any && warp % 4 == 0, lane = thread % 32, i = lane % CUDA_L2_WORDS;
    const unsigned base = (unsigned)__cvta_generic_to_shared(cuda_l2_watched), mine = any ? warp : 0;
    committed = base + mine * CUDA_L2_EACH, waited = committed + 4, watched = committed + 8, place = committed + 12;
    words = committed + 16, others = base + mine / 4 * 4 * CUDA_L2_EACH + 4;
  }
};

static __device__ __forceinline__ void cuda_l2_watch() {
  const cuda_l2_Warp w;
  cuda_l2_store(w.any && w.lane < 4, w.committed + w.lane % 4 * 4, 0);
}

// x and y: descriptors of operands in shared memory, whose low 14 bits are the address over 16.
static __device__ __forceinline__ void cuda_l2_issued(unsigned long long x, unsigned long long y) {
  const cuda_l2_Warp w;
  const unsigned committed = cuda_l2_load(w.committed);
  // a block of a cluster has an address range of its own, which a descriptor does not name
  const unsigned from = (w.committed & ~0x3FFFFu) | (unsigned)((committed + SEEDu & 1 ? x : y) & 0x3FFF) << 4;
  const bool take = w.leads && cuda_l2_load(w.watched) == 0;
  cuda_l2_store(take, w.words + w.i * 4, cuda_l2_load(from + w.i * 32));
  cuda_l2_store(take && w.lane == 0, w.place, from);
  cuda_l2_store(take && w.lane == 0, w.watched, committed + 1);
}

static __device__ __forceinline__ void cuda_l2_committed() {
  const cuda_l2_Warp w;
  cuda_l2_store(w.any && w.lane == 0, w.committed, cuda_l2_load(w.committed) + 1);
}

// Ahead of a wait that leaves so many groups pending.
static __device__ __forceinline__ void cuda_l2_waits(unsigned pending) {
  const cuda_l2_Warp w;
  const unsigned committed = cuda_l2_load(w.committed), done = committed > pending ? committed - pending : 0;
  const unsigned watched = cuda_l2_load(w.watched), place = cuda_l2_load(w.place);
  const bool looks = w.leads && watched != 0 && watched <= done;
  const unsigned now = cuda_l2_load(looks ? place + w.i * 32 : w.committed), was = cuda_l2_load(w.words + w.i * 4);
  // another warp may have waited since, and what was read have been overwritten by right; it said so before that
  const bool waited = cuda_l2_load(w.others + w.lane % 4 * CUDA_L2_EACH) >= watched;
  const bool wrong = __any_sync(~0u, looks && now != was) && !__any_sync(~0u, waited);
  cuda_l2_store(wrong, 0xFFFFFFF0u, 0);  // faults; a trap would be a way out, and wgmma serialised
  cuda_l2_store(w.any && w.lane == 0, w.waited, done);
  cuda_l2_store(looks && w.lane == 0, w.watched, 0);
}
