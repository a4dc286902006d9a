#define WARPS_M 1
#define WARPS_N WARPS
#define WARP_M 0
#define WARP_N (threadIdx.x / 32)
