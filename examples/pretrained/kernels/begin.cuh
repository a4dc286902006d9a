#include <cuda_fp16.h>
#define FOR(i, n) _Pragma("unroll") for (int i = 0; i < n; i++)
#define X (16 * MT * WM)
#define Y (8 * NT * WN)
#define Z (16 * KS * WK)
#define P (Z + PAD)
#define T (32 * WM * WN * WK)
#define Q (4 * MT * NT)

__device__ int at(half *p) {
    return __cvta_generic_to_shared(p);
}

__device__ void mma(float *d, int *a, int *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ void fetch(half *to, half *from, int rows, int k) {
    for (int i = threadIdx.x * VEC; i < rows * Z; i += T * VEC)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at(to + i / Z * P + i % Z)),
                     "l"(from + i / Z * k + i % Z), "n"(2 * VEC));
}

