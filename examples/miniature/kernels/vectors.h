typedef _Float16 half_t;
typedef half_t hv __attribute__((vector_size(2 * VW), aligned(2)));
typedef float vf __attribute__((vector_size(4 * VW), aligned(4)));
#define NR (NV * VW)
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); ++i)
#define WIDE(p) __builtin_convertvector(*(const hv *)(p), vf)
