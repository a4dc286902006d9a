// Part of the body of sm90_persistent.cu: the epilogue of one tile, by stmatrix to shared memory and from there by TMA (PTX
// ISA, stmatrix; cp.async.bulk.tensor; bulk async-groups).
// In: acc[MW][WORDS], the sums of this thread; row0, col0 of the warpgroup's tile, or its first row of a shared one; mine,
// the staging space of the warp or warpgroup; chunk, boxes staged so far. A box waits until the one that was OUT before it
// has been read.
    const int quarter = warp & 3;
    if constexpr (SWAP || WGSTORE) {
      // a 64-row slab at a time through one buffer of the warpgroup, in boxes of 64 columns; swapped: 64 columns x BN rows
      const bool leader = (tid & 127) == 0;
#pragma unroll
      for (int m = 0; m < MW; m++) {
        if (leader) tma_store_wait_read<OUT - 1>();  // the store that used this buffer has read it
        named_sync(4 + wg, 128);
        const u32 buf = mine + (chunk++ % OUT) * OUT_BYTES;
#pragma unroll
        for (int j = 0; j < BN / 8; j += 2) {
          const int i = lane >> 3, r = SWAP ? lane & 7 : quarter * 16 + (lane & 15), c = SWAP ? quarter * 2 + (i & 1) : j + (lane >> 4);
          const u32 at = buf + (SWAP ? ((j + (i >> 1)) * 8 + r) * 128 : (c >> 3) * 8192 + r * 128) + (((c & 7) ^ (r & 7)) << 4);
          stmatrix4<SWAP>(at, pair(acc[m], 2 * j), pair(acc[m], 2 * j + 1), pair(acc[m], 2 * j + 2), pair(acc[m], 2 * j + 3));
        }
        proxy_fence();
        named_sync(4 + wg, 128);
        if (leader) {
          if (SWAP) tma_store<HINT>(&map_c, buf, row0 + m * 64, col0);
          else
#pragma unroll
            for (int c = 0; c < BN / 64; c++) tma_store<HINT>(&map_c, buf + c * 8192, col0 + c * 64, row0 + m * 64);
          tma_store_commit();
        }
      }
    } else {
#pragma unroll
      for (int m = 0; m < MW; m++)
#pragma unroll
        for (int c = 0; c < BN / CW; c++) {
          if (lane == 0) tma_store_wait_read<OUT - 1>();
          __syncwarp();
          const u32 buf = mine + (chunk++ % OUT) * CHUNK_BYTES;
#pragma unroll
          for (int j = 0; j < CW / 8; j += 2) {
            const int p = c * (CW / 4) + 2 * j, r = lane & 15, flip = CW == 64 ? r & 7 : 0;  // the swizzle of C's tensor map
            const u32 at = buf + r * (CW * 2);
            if (j + 1 < CW / 8) stmatrix4<false>(at + (((j + (lane >> 4)) ^ flip) << 4), pair(acc[m], p), pair(acc[m], p + 1), pair(acc[m], p + 2), pair(acc[m], p + 3));
            else stmatrix2<false>(at + j * 16, pair(acc[m], p), pair(acc[m], p + 1));
          }
          proxy_fence();
          __syncwarp();
          if (lane == 0) {
            tma_store<HINT>(&map_c, buf, col0 + c * CW, row0 + m * 64 + quarter * 16);
            tma_store_commit();
          }
        }
    }
