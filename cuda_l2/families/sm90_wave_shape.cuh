#pragma once
// Sizes of a block of sm90_wave.cu, as its macros give them. Shape of _sm90_wave_space.py computes the same for the contract.
#include "sm90_multicast.cuh"
#include "sm90_sums.cuh"

constexpr int MW = BM / 64 / NWG;  // 64-row slabs a warpgroup
constexpr int R = MW * NA;         // sums a thread
constexpr int CS = SHARING * CK;   // cluster size
// setmaxnreg needs the producer to be a whole warpgroup; few sums do without.
constexpr bool SPLIT_REGS = MW * WORDS >= 128 && NWG > 1;
constexpr int THREADS = NC + (SPLIT_REGS ? 128 : 32);
constexpr u32 X_BYTES = KB * BM * 128, STAGE_BYTES = X_BYTES + KB * BN * 128;
constexpr int RK = R / CK;   // sums a thread owns after the cluster sum
constexpr int RL = RK / SL;  // ... and after the exchange through L2
constexpr int VK = RK % 4 ? 2 : 4, VL = RL % 4 ? 2 : 4;  // sums that move at once
constexpr u32 INBOX_BYTES = (CK - 1) * RK * NC * 4;
constexpr u32 STAGED_BYTES = NC / 32 * (SWAP ? BN * 48 : 16 * (BN * 2 + 16));  // C, before it is stored
constexpr bool TABLE = CS > 1 || SL > 1;  // there are orders of tiles that the grid cannot express
constexpr bool PLAIN = CK == 1 && SL == 1;
static_assert(BM % (64 * NWG) == 0 && BN % 8 == 0 && (!SWAP || SL == 1), "tile");
static_assert(R % CK == 0 && RK % SL == 0 && RL % VL == 0 && RK % VK == 0, "split");
static_assert(RL <= NA ? NA % RL == 0 : RL % NA == 0, "a block's share of the sums is part of a slab, or whole slabs");
static_assert(CK == 1 || STAGED_BYTES <= STAGES * STAGE_BYTES, "C is staged below the inbox");
static_assert(BM / CN % (X_MN ? 64 : 8) == 0 && BN / CM % (Y_MN ? 64 : 8) == 0, "slices of a multicast");

#if SL > 1
// What the polled words of the exchange hold until a sum arrives. It is a NaN; a sum with these very bits is sent as the NaN
// below it.
constexpr u32 EMPTY = 0xffffffffu;
constexpr int SPINS = 1 << 22;  // then the result is wrong, but the device is free again; about three seconds
#endif
