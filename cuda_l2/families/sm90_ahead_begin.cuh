  // In place of sm90_wave_begin.cuh: the weights, B, of the ring's stages are on their way before the launch ahead has
  // ended, A's loads come after it. No block shares its loads.
  static_assert(!MULTI && PDL, "weights ahead");
  if (__any_sync(~0u, tid >= NC && tid < NC + 32) && elect_one()) {
    const int early = least(work.n, EARLY);
    auto load_x = [&](int i) {
      load_slice<X_MN, X_FLAT, KB, BM, BM, false, false>(ring + i * STAGE_BYTES, &map_x, work.row0, 0, work.k0 + i, full + i * 8, 0);
    };
    auto load_y = [&](int i) {
      load_slice<Y_MN, Y_FLAT, KB, BN, BN, false, false>(ring + i * STAGE_BYTES + X_BYTES, &map_y, work.col0, 0, work.k0 + i, full + i * 8, 0);
    };
    prefetch_map(&map_x);
    prefetch_map(&map_y);
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      bar_init(full + s * 8, 1);
      bar_init(empty + s * 8, NWG);
    }
    if (CK > 1) bar_init(inbox_bar, 1);
    bar_init_fence();
    if (CK > 1) bar_expect(inbox_bar, INBOX_BYTES);
#pragma unroll 1
    for (int i = 0; i < early; i++) {
      bar_expect(full + i * 8, STAGE_BYTES);
      if constexpr (SWAP) load_x(i);
      else load_y(i);
    }
    pdl_wait();
#pragma unroll 1
    for (int i = 0; i < early; i++)
      if constexpr (SWAP) load_y(i);
      else load_x(i);
  }
