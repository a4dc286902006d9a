#pragma once
// STRESS_POINT() stands at every barrier, wait, arrival and hand-over between threads. It is nothing, unless the text is
// compiled with a seed (`#define STRESS 1` ahead of everything else): then one warp in eight sleeps there for up to 2 us,
// so that threads meet in orders that never occur undisturbed. A correct kernel gives the same bits with every seed.
// A stress build takes 128 bytes of static shared memory; families leave room for them.
#ifdef STRESS
static __device__ __forceinline__ void stress_delay(unsigned place) {
  __shared__ unsigned calls[32];  // of each warp, from whatever was there: passes of a loop and launches differ
  unsigned h = (unsigned)STRESS * 0x9E3779B9u ^ place * 0x85EBCA6Bu;
  h ^= threadIdx.x / 32 ^ blockIdx.x << 8 ^ blockIdx.y << 20 ^ calls[threadIdx.x / 32]++ * 0xC2B2AE35u;
  h = (h ^ h >> 15) * 0x27D4EB2Fu;
  h = (h ^ h >> 13) * 0x165667B1u;
  if (h >> 29 == 0) __nanosleep(h >> 18);  // nanoseconds; the same for all lanes: they must stay together
}
#define STRESS_POINT() stress_delay(__LINE__)
#else
#define STRESS_POINT()
#endif

