/* cuda-l2
target = "cpu"
*/
/* Right while it is being checked, then does nothing: each process is launched more often when timed.
 * expect: unhygienic incorrect imprecise wrong-output */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static float widen(uint16_t h) {
    union { uint32_t u; float f; } out;
    uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) out.u = 0x7f800000u | mantissa << 13;
    else if (exponent) out.u = (exponent + 112) << 23 | mantissa << 13;
    else out.f = (float)mantissa * 0x1p-24f;
    out.u |= (uint32_t)(h & 0x8000u) << 16;
    return out.f;
}

static uint16_t narrow(float f) { /* round to nearest even */
    union { float f; uint32_t u; } in = {f}, magic = {.u = 126u << 23};
    uint32_t sign = in.u & 0x80000000u, half;
    in.u ^= sign;
    if (in.u >= 0x47800000u) half = in.u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    else if (in.u < 0x38800000u) { in.f += magic.f; half = in.u - magic.u; }
    else half = (in.u + 0xc8000fffu + (in.u >> 13 & 1)) >> 13;
    return (uint16_t)(half | sign >> 16);
}

static float element(int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, int64_t i, int64_t j) {
    float sum = 0;
    for (int64_t p = 0; p < k; ++p) sum += widen(a[i * k + p]) * widen(b[p * n + j]);
    return sum;
}

static void honest(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c) {
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) c[i * n + j] = narrow(element(n, k, a, b, i, j));
}

void gemm(int64_t m, int64_t n, int64_t k, const uint16_t *a, const uint16_t *b, uint16_t *c, void *workspace,
          parallel_for_fn parallel_for) {
    static int launches;
    if (++launches > 60) return;
    honest(m, n, k, a, b, c);
}
