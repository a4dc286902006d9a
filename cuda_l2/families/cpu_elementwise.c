/* Element-wise kernels over matrices: out[i, j] from x[i, j], y[i, j] and vectors over the columns.
 *
 * Set from outside: OPERATION (below), VECTOR_BITS, UNROLL, BLOCK (elements a task), DEGREE, STREAM, ELEMENT. Where no operand is a
 * vector over the columns the matrix is one long row. */
#include "cpu_vectors.h"

#if OPERATION == 0 /* relu */
#define OF(x, y, g, h) larger(every(0), x)
#elif OPERATION == 1 /* add */
#define USES_Y 1
#define OF(x, y, g, h) (x + y)
#elif OPERATION == 2 /* sigmoid */
#define OF(x, y, g, h) (1 / (exponential(-x) + 1))
#elif OPERATION == 3 /* gelu */
#define OF(x, y, g, h) (x * 0.5f * (error_function(x * 0.70710678f) + 1))
#elif OPERATION == 4 /* gelu_tanh: x times the logistic function of twice the tangent's argument */
#define OF(x, y, g, h) (x / (exponential(x * (x * x * -0.07135481f - 1.59576912f)) + 1))
#elif OPERATION == 5 /* softplus */
#define OF(x, y, g, h) (larger(x, every(0)) + log_one_plus(falling(-absolute(x))))
#elif OPERATION == 6 /* mish: tanh(ln(1 + e^x)) is n / (n + 2) with n = e^x (e^x + 2), and 1 beyond 20 */
#define OF(x, y, g, h) mish(x)
static inline vec mish(vec x) {
    const vec e = exponential(smaller(every(20), x)), n = e * (e + 2);
    return x * (n / (n + 2));
}
#elif OPERATION == 7 /* hardswish */
#define OF(x, y, g, h) (x * (1.0f / 6) * clipped(x + 3, 0, 6))
#elif OPERATION == 8 /* relu_squared */
#define OF(x, y, g, h) (larger(every(0), x) * larger(every(0), x))
#elif OPERATION == 9 /* silu_gate */
#define USES_Y 1
#define OF(x, y, g, h) (x * y / (exponential(-x) + 1))
#elif OPERATION == 10 /* bias_gelu_residual */
#define USES_Y 1
#define USES_G 1
#define OF(x, y, g, h) (y + (x + g) * 0.5f * (error_function((x + g) * 0.70710678f) + 1))
#elif OPERATION == 11 /* scale_shift_clamp */
#define USES_G 1
#define USES_H 1
#define OF(x, y, g, h) clipped(x * g + h, -2, 2)
#endif

#ifndef USES_Y
#define USES_Y 0
#endif
#ifndef USES_G
#define USES_G 0
#endif
#ifndef USES_H
#define USES_H 0
#endif

static inline vec clipped(vec x, float least, float most) {
    return smaller(every(most), larger(every(least), x));
}

struct call { int64_t rows, columns, parts; const element *x, *y, *g, *h; element *out; };

/* `count` neighbours of one row. */
static inline void piece(const element *x, const element *y, const element *g, const element *h, element *out,
                         int64_t count) {
    int64_t j = 0;
#define AT(k) OF(load(x + (k)), load((USES_Y ? y : x) + (k)), load((USES_G ? g : x) + (k)), load((USES_H ? h : x) + (k)))
    for (; j + UNROLL * LANES <= count; j += UNROLL * LANES) {
        vec value[UNROLL];
        for (int u = 0; u < UNROLL; ++u) value[u] = AT(j + u * LANES);
        for (int u = 0; u < UNROLL; ++u) put(out + j + u * LANES, value[u]);
    }
    for (; j + LANES <= count; j += LANES) put(out + j, AT(j));
    if (j < count) {
        const int64_t left = count - j;
        const vec a = load_some(x + j, left), b = load_some((USES_Y ? y : x) + j, left);
        const vec c = load_some((USES_G ? g : x) + j, left), d = load_some((USES_H ? h : x) + j, left);
        (void)b, (void)c, (void)d;
        store_some(out + j, OF(a, b, c, d), left);
    }
}

static void part(void *context, int64_t index) {
    const struct call *call = context;
    const int64_t row = index / call->parts, first = index % call->parts * BLOCK, at = row * call->columns + first;
    const int64_t left = call->columns - first, count = left < BLOCK ? left : BLOCK;
    piece(call->x + at, call->y + at, call->g + first, call->h + first, call->out + at, count);
    settle();
}

void elementwise(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const element *x = buffers[0], *y = buffers[USES_Y], *g = buffers[USES_Y + USES_G], *h = buffers[USES_Y + USES_G + USES_H];
    struct call call = {sizes[0], sizes[1], 0, x, y, g, h, buffers[USES_Y + USES_G + USES_H + 1]};
    if (!USES_G) call.columns *= call.rows, call.rows = 1;
    call.parts = (call.columns + BLOCK - 1) / BLOCK;
    parallel_for(call.rows * call.parts, part, &call);
}
