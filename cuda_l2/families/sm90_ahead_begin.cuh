  // In place of sm90_wave_begin.cuh: the weights, B, of the ring's stages are on their way before the launch ahead has
  // ended, A's loads come after it. No block shares its loads.
  static_assert(!MULTI && PDL, "weights ahead");
  if (__any_sync(~0u, tid >= NC && tid < NC + 32) && elect_one()) {
    auto load_x = [&](int i) {
      load_slice<X_MN, X_FLAT, KB, BM, BM, false, false>(ring + i * STAGE_BYTES, &map_x, row0, 0, k0 + i, full + i * 8, 0);
    };
    auto load_y = [&](int i) {
      load_slice<Y_MN, Y_FLAT, KB, BN, BN, false, false>(ring + i * STAGE_BYTES + X_BYTES, &map_y, col0, 0, k0 + i, full + i * 8, 0);
    };
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
#if FETCH  // the rest of the block's weights goes as far as L2
    auto fetch = [&](int x, int row, int z) {
      asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(SWAP ? &map_x : &map_y), "r"(x), "r"(row), "r"(z)
                   : "memory");
    };
    constexpr bool PIECEWISE = SWAP ? X_FLAT : Y_FLAT;
    const int row = SWAP ? row0 : col0;
#pragma unroll 1
    for (int i = early; i < n; i++)
#pragma unroll
      for (int u = 0; u < (PIECEWISE ? KB : 1); u++)
        if (PIECEWISE) fetch(((k0 + i) * KB + u) * 64, row, 0);
        else fetch(0, row, (k0 + i) * KB);
#endif
    pdl_wait();
#pragma unroll 1
    for (int i = 0; i < early; i++)
      if constexpr (SWAP) load_y(i);
      else load_x(i);
  }
