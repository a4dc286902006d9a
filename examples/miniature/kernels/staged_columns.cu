#include "columns.cuh"
#include "mma.cuh"
#include "staged.cuh"
#include "gemm.cuh"
