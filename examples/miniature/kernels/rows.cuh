#define WARPS_M WARPS
#define WARPS_N 1
#define WARP_M (threadIdx.x / 32)
#define WARP_N 0
