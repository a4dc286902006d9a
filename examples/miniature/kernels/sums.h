typedef float vec __attribute__((vector_size(4 * VW), aligned(4)));
#define EACH(i) _Pragma("GCC unroll 16") for (int i = 0; i < NV; ++i)
#define STEP (NV * VW)
#define AT(p, v) (*(vec *)((p) + j + (v) * VW))
