static void tile(const half_t *a, const panel_t *b, half_t *c, long n, long k) {
    vf sum[MR][NV] = {0};
    for (long p = 0; p < k; ++p) {
        vf y[NV];
        EACH(v, NV) y[v] = WIDE(b + p * STRIDE + v * VW);
        EACH(r, MR) EACH(v, NV) sum[r][v] += (float)a[r * k + p] * y[v];
    }
    EACH(r, MR) EACH(v, NV) *(hv *)(c + r * n + v * VW) = __builtin_convertvector(sum[r][v], hv);
}
struct job { long m, n, k; const half_t *a, *b; half_t *c; };
