#pragma once
// Sums of a consumer thread in registers, for wgmma m64nBNk16 with both operands in shared memory (PTX ISA, asynchronous
// warpgroup-level matrix instructions). `wgmma` itself is text of the schedule, placed before all files.
// Shapes: a warpgroup sums slabs of 64 x BN of the product; a thread holds NA sums a slab in WORDS registers.
#include "sm90_operands.cuh"

#if ACC == 16
using Sum = u32;  // a pair of fp16
#else
using Sum = float;
#endif
constexpr bool X_MN = SWAP && !LAYOUT_TN, Y_MN = !SWAP && !LAYOUT_TN;
constexpr int NA = BN / 2;                      // sums a thread and slab
constexpr int WORDS = ACC == 16 ? NA / 2 : NA;  // registers a slab
constexpr int NC = NWG * 128;                   // consumer threads
