// Part of the body of sm90_wave.cu and of sm90_ragged.cu: the sum over the CK parts of K within a cluster, through
// distributed shared memory (PTX ISA, st.async; mbarrier). All blocks of the cluster are there, with their barriers armed.
// In: sum[R], this thread's sums over this block's part of K, and what sm90_wave_owners.cuh has worked out. Out: own[RK], sums
// [ck * RK, (ck + 1) * RK) of the thread over all CK parts, in one fixed order: the own part, then the senders' by rank.
// Every block sends the sums that it does not keep to their owners; an inbox holds [CK - 1 senders][RK / VK][NC][VK] fp32
// values, and its barrier counts them.
    if constexpr (CK > 1) {
#pragma unroll
      for (int o = 0; o < CK; o++) {
        if (o == ck) {
#pragma unroll
          for (int i = 0; i < RK; i++) own[i] = sum[o * RK + i];
        } else {
          const u32 bar = map_rank(sums_bar, (o * CN + cn) * CM + cm);
#pragma unroll
          for (int i = 0; i < RK; i += VK) send_async<VK>(to_owner[o] + i * NC * 4, &sum[o * RK + i], bar);
        }
      }
      bar_wait(sums_bar, 0);
#pragma unroll
      for (int j = 0; j < CK - 1; j++) {
        const u32 from = inbox + (j * RK * NC + tid * VK) * 4;
#pragma unroll
        for (int i = 0; i < RK; i += VK) {
          float v[4];
          ld_shared<VK>(from + i * NC * 4, v);
#pragma unroll
          for (int e = 0; e < VK; e++) own[i + e] += v[e];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < RK; i++) own[i] = sum[i];
    }
