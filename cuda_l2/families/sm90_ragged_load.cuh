#pragma once
          load_slice<X_MN, true, KB, BM, BM, false, false>(x, &map_x, row0, 0, k0 + i, bar, 0);
          load_slice<Y_MN, true, KB, BN, BN, false, false>(x + X_BYTES, &map_y, col0, 0, k0 + i, bar, 0);
