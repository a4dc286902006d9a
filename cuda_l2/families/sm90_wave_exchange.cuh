// Part of the body of sm90_wave.cu, where SL > 1: the sum over SL parts of K beyond a cluster, through L2 (PTX ISA, memory
// consistency model: relaxed and acquire at .gpu scope). All blocks are resident.
// In: own[RK], this thread's sums over this part; unit, the tile's part within its cluster, counted over C; to, our place
// among the senders to owner 0, and from, that of sender 0 to us. Out: out[RL], sums [sl * RL, (sl + 1) * RL) of own over
// all SL parts, in one fixed order: the own part, then the others by number.
// parts: [tiles * CK][SL owners][SL - 1 senders][RL / VL][NC][VL] fp32 values. Arrival is announced in one of two ways:
//   COUNT 0  the words themselves are polled: EMPTY until they are written, and EMPTY again when they have been read
//   COUNT 1  counters, [tiles * CK][SL], are 0 before and after
#pragma unroll
    for (int o = 0; o < SL; o++) {
      if (o == sl) {
#pragma unroll
        for (int i = 0; i < RL; i++) out[i] = own[o * RL + i];
      } else {
        u32 *w = to + (o * (SL - 1) - (o < sl ? 1 : 0)) * RL * NC;
#pragma unroll
        for (int i = 0; i < RL; i += VL) {
          u32 x[VL];
#pragma unroll
          for (int e = 0; e < VL; e++) {
            x[e] = __float_as_uint(own[o * RL + i + e]);
            if (!COUNT) x[e] = least(x[e], EMPTY - 1);
          }
          st_relaxed(w + i * NC, x);
        }
      }
    }
#if COUNT
    u32 *count = counters + unit * SL;
    named_sync(1, NC);
    if (tid < SL && tid != sl) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count + tid) : "memory");
    if (tid == 0) {
      u32 v;
      int spins = 0;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(count + sl) : "memory");
      } while (v != SL - 1 && ++spins < SPINS);
      count[sl] = 0;  // all senders have counted: the workspace is as it was found
    }
    named_sync(1, NC);
#endif
    // senders read at once, by registers
    constexpr int GROUP = SL * RL <= 64 ? SL - 1 : 64 / RL > 0 ? 64 / RL : 1;
#pragma unroll
    for (int j0 = 0; j0 < SL - 1; j0 += GROUP) {
      u32 x[GROUP][RL];
      bool ready;
      int spins = 0;
      do {
        ready = true;
#pragma unroll
        for (int j = 0; j < GROUP; j++)
          if (j0 + j < SL - 1)
#pragma unroll
            for (int i = 0; i < RL; i += VL) ld_relaxed<VL>(from + (j0 + j) * RL * NC + i * NC, &x[j][i]);
        if constexpr (!COUNT) {
#pragma unroll
          for (int j = 0; j < GROUP; j++)
            if (j0 + j < SL - 1)
#pragma unroll
              for (int i = 0; i < RL; i++) ready &= x[j][i] != EMPTY;
        }
      } while (!ready && ++spins < SPINS);
#pragma unroll
      for (int j = 0; j < GROUP; j++)
        if (j0 + j < SL - 1)
#pragma unroll
          for (int i = 0; i < RL; i += VL) {
#pragma unroll
            for (int e = 0; e < VL; e++) out[i + e] += __uint_as_float(x[j][i + e]);
            if constexpr (!COUNT) {
              u32 fill[VL];
#pragma unroll
              for (int e = 0; e < VL; e++) fill[e] = EMPTY;
              st_relaxed(from + (j0 + j) * RL * NC + i * NC, fill);
            }
          }
    }
