#pragma once
// Blocks that sit side by side in C share the loads of operands. Subject: CM x CN blocks of a cluster, rank cn * CM + cm
// counted from their first one, multicast by TMA (PTX ISA, cp.async.bulk.tensor, .multicast::cluster).
// The CN blocks of a column of the cluster read the same X, the CM blocks of a row the same Y.
#include "sm90_ptx.cuh"

constexpr int SHARING = CM * CN;
constexpr bool MULTI = SHARING > 1;

// A consumer warpgroup has read a stage: says so to every block that writes this stage of ours, which are our own and
// those in our row and column of the cluster. empty: the barrier of stage 0.
DEV void release_stage(u32 empty, int s, int tid, int cm, int cn, int ck) {
  if (MULTI) {
    const int i = tid & 127;
    if (i < CM + CN - 1) {
      const int c = i < CM ? cn * CM + i : ((i - CM) + (i - CM >= cn ? 1 : 0)) * CM + cm;
      bar_arrive_remote(empty + s * 8, c + ck * SHARING);
    }
  } else if ((tid & 127) == 0) {
    bar_arrive(empty + s * 8);
  }
}
