typedef float panel_t;
static const panel_t *prepare(panel_t *panel, const half_t *b, long n, long k) {
    for (long p = 0; p < k; ++p)
        EACH(v, NV) *(vf *)(panel + p * NR + v * VW) = WIDE(b + p * n + v * VW);
    return panel;
}
#undef WIDE
#define WIDE(p) (*(const vf *)(p))
#define STRIDE NR
#define PANEL_SIZE (NR * j->k)
