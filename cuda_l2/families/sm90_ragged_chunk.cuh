#pragma once
// Elements `at` to at + 7 of `from`, which begins at a multiple of 16 bytes: from the two chunks that hold them. Nothing
// behind element `end` is read.
DEV uint4 unaligned_chunk(const u16 *from, long long at, long long end) {
  const long long first = at & ~7ll;
  if (first + 16 <= end) {
    const uint4 low = __ldg((const uint4 *)(from + first)), high = __ldg((const uint4 *)(from + first + 8));
    u32 w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (at & 4)
#pragma unroll
      for (int i = 0; i < 6; i++) w[i] = w[i + 2];
    if (at & 2)
#pragma unroll
      for (int i = 0; i < 5; i++) w[i] = w[i + 1];
    const int bits = (int)(at & 1) * 16;
    return make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                      __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits));
  }
  u32 w[4] = {};
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (at + i < end) w[i / 2] |= (u32)from[at + i] << i % 2 * 16;
  return make_uint4(w[0], w[1], w[2], w[3]);
}

