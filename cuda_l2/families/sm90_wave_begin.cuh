  if (__any_sync(~0u, tid >= NC && tid < NC + 32) && elect_one()) {
    auto arm = [&] {  // all barriers but the first stage's
#pragma unroll
      for (int s = 0; s < STAGES; s++) {
        if (s > 0) bar_init(full + s * 8, 1);
        bar_init(empty + s * 8, NWG * (MULTI ? CM + CN - 1 : 1));
      }
      if (CK > 1) bar_init(inbox_bar, 1);
      bar_init_fence();
      if (CK > 1) bar_expect(inbox_bar, INBOX_BYTES);
    };
    prefetch_map(&map_x);
    prefetch_map(&map_y);
    bar_init(full, 1);
    bar_init_fence();
#if PDL == 1  // a launch that was let in at the top has time before the wait; else the first load is what hurries
    if (dependent) {
      arm();
      pdl_wait();
      if (EARLY) load(work.k0, 0, constant<false>());
    } else
#endif
    {
      pdl_wait();
      if (EARLY) load(work.k0, 0, constant<false>());
      arm();
    }
#pragma unroll 1
    for (int i = 1; i < least(work.n, EARLY); i++) load(work.k0 + i, i, constant<false>());
  }
