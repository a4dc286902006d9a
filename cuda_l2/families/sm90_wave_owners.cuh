// Part of the body of sm90_wave.cu and of sm90_ragged.cu: what sm90_wave_cluster_sum.cuh needs, worked out while the first
// operands are on their way. to_owner[CK]: where each owner's inbox has room for this thread's sums, in its block's memory
// (our own is not used). The empty asm keeps both in registers: else they are worked out when the sums are there.
  const u32 inbox = ring + STAGES * STAGE_BYTES;  // [CK - 1 senders][RK / VK][NC][VK] floats
  u32 to_owner[CK], sums_bar = inbox_bar;
  asm volatile("" : "+r"(sums_bar));
#pragma unroll
  for (int o = 0; o < CK && CK > 1; o++) {
    const int slot = ck - (o < ck ? 1 : 0);  // our place among the owner's senders
    to_owner[o] = map_rank(inbox + slot * RK * NC * 4 + tid * VK * 4, (o * CN + cn) * CM + cm);
    asm volatile("" : "+r"(to_owner[o]));
  }
