#include "rows.cuh"
#include "mma.cuh"
#include "straight.cuh"
#include "gemm.cuh"
