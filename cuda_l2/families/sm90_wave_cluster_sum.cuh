// Part of the body of sm90_wave.cu: the sum over the CK parts of K within a cluster, through distributed shared memory
// (PTX ISA, st.async; mbarrier).
// In: sum[R], this thread's sums over this block's part of K. Out: own[RK], sums [ck * RK, (ck + 1) * RK) of the thread
// over all CK parts, in one fixed order: the own part, then the senders' by rank. Every block sends the sums that it does
// not keep to their owners; an inbox holds [CK - 1 senders][RK / VK][NC][VK] fp32 values, and its barrier counts them.
    if constexpr (CK > 1) {
      const u32 inbox = ring + STAGES * STAGE_BYTES;  // [CK - 1 senders][RK / VK][NC][VK] floats
      if (!MULTI) cluster_wait();                     // every peer has armed its barrier
#pragma unroll
      for (int o = 0; o < CK; o++) {
        if (o == ck) {
#pragma unroll
          for (int i = 0; i < RK; i++) own[i] = sum[o * RK + i];
        } else {
          const int slot = ck - (ck > o ? 1 : 0);  // our place among o's senders
          const u32 dst = map_rank(inbox + (slot * RK * NC + tid * VK) * 4, (o * CN + cn) * CM + cm);
          const u32 bar = map_rank(inbox_bar, (o * CN + cn) * CM + cm);
#pragma unroll
          for (int i = 0; i < RK; i += VK) {
            const u32 d = dst + i * NC * 4;
            const float *f = &sum[o * RK + i];
            send_async<VK>(d, f, bar);
          }
        }
      }
      bar_wait(inbox_bar, 0);
#pragma unroll
      for (int j = 0; j < CK - 1; j++) {
        const u32 src = inbox + (j * RK * NC + tid * VK) * 4;
#pragma unroll
        for (int i = 0; i < RK; i += VK) {
          float v[4];
          ld_shared<VK>(src + i * NC * 4, v);
#pragma unroll
          for (int e = 0; e < VK; e++) own[i + e] += v[e];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < RK; i++) own[i] = sum[i];
    }
