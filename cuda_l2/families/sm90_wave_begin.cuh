  if (__any_sync(~0u, tid >= NC && tid < NC + 32) && elect_one()) {
    bar_init(full, 1);
    bar_init_fence();
    pdl_wait();
    if (early > 0) load(k0, 0, constant<false>());
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      if (s > 0) bar_init(full + s * 8, 1);
      bar_init(empty + s * 8, NWG * (MULTI ? CM + CN - 1 : 1));
    }
    if (CK > 1) bar_init(inbox_bar, 1);
    bar_init_fence();
    if (CK > 1) bar_expect(inbox_bar, INBOX_BYTES);
#pragma unroll 1
    for (int i = 1; i < early; i++) load(k0 + i, i, constant<false>());
  }
