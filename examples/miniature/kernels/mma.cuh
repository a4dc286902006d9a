#include <cuda_fp16.h>
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < (count); i++)
#define BM (16 * MT * WARPS_M)
#define BN (8 * NT * WARPS_N)
static __device__ void mma(float *d, const unsigned *a, const unsigned *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
static __device__ void multiply(float (*d)[NT][4], const half *a, const half *b, int pitch) {
    unsigned x[MT][4], y[NT][2];
    EACH(i, MT) EACH(e, 4) x[i][e] = *(const unsigned *)(a + (i * 16 + e % 2 * 8) * pitch + e / 2 * 8);
    EACH(j, NT) EACH(e, 2) y[j][e] = *(const unsigned *)(b + j * 8 * pitch + e * 8);
    EACH(i, MT) EACH(j, NT) mma(d[i][j], x[i], y[j]);
}
