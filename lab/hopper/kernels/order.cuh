// The order of tiles, worked out on the host: at[i] = tile row | tile column << 8, in cluster tiles, for cluster i.
// A lookup in the parameter bank replaces integer divisions (0.1 to 0.2 us before the first load), and lets the host
// give the blocks of one GPC a compact part of C, so that they ask for the same operand lines at the same time.
#pragma once
#include <stdint.h>
template <int N> struct Order { uint16_t at[N]; };
