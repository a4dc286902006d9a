#include "columns.cuh"
#include "mma.cuh"
#include "straight.cuh"
#include "gemm.cuh"
