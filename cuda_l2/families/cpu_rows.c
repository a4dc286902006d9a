/* Kernels that reduce each row of a matrix, and most of them map it afterwards: softmax, norms, losses.
 *
 * Set from outside: OPERATION (below), VECTOR_BITS, UNROLL (sums kept apart), ROWS (rows a task), KEEP (1: exponentials are
 * kept in the output instead of computed twice), DEGREE, STREAM, ELEMENT.
 *
 * An operation says what is reduced over a row: MOST, a largest element m; then up to two sums s and t of terms in x and y,
 * which may use what was found before. Then either ROW, one number a row, and TOTAL if the rows' numbers are added up, or
 * EACH, a row, from scalars that SETUP makes. */
#include "cpu_vectors.h"

#if OPERATION == 0 /* softmax */
#define MOST 1
#define S falling(x - m)
#define SETUP const float scale = 1 / s;
#define KEPT kept * scale
#define EACH falling(x - m) * scale
#elif OPERATION == 1 /* log_softmax */
#define MOST 1
#define S falling(x - m)
#define SETUP const float log_s = logarithm(s);
#define EACH (x - m) - log_s
#elif OPERATION == 2 /* logsumexp; where m is infinite, x - m would be NaN at the elements that are m */
#define MOST 1
#define S falling(choose(x == m, every(0), x - m))
#define ROW m + logarithm(s)
#elif OPERATION == 3 /* layer_norm */
#define WEIGHTS 2
#define S x
#define AFTER_S const float mean = s / columns;
#define T (x - mean) * (x - mean)
#define SETUP const float scale = inverse_root(t / columns + 1e-5f);
#define EACH (x - mean) * scale * g + h
#elif OPERATION == 4 /* rms_norm */
#define WEIGHTS 1
#define S x * x
#define SETUP const float scale = inverse_root(s / columns + 1e-6f);
#define EACH x * scale * g
#elif OPERATION == 5 /* normalise_rows */
#define S x * x
#define SETUP const float scale = s <= 1e-24f ? 1e12f : inverse_root(s);
#define EACH x * scale
#elif OPERATION == 6 /* sum_rows */
#define S x
#define ROW s
#elif OPERATION == 7 /* variance_rows */
#define S x
#define AFTER_S const float mean = s / columns;
#define T (x - mean) * (x - mean)
#define ROW t / (columns - 1)
#elif OPERATION == 8 /* l2_norm_rows */
#define S x * x
#define ROW s > 0 && s < __builtin_inff() ? s * inverse_root(s) : s
#elif OPERATION == 9 /* sum_all */
#define S x
#define ROW s
#define TOTAL total
#elif OPERATION == 10 /* mse */
#define MATRICES 2
#define S (x - y) * (x - y)
#define ROW s
#define TOTAL total / ((float)rows * columns)
#elif OPERATION == 11 /* cross_entropy */
#define LABELS 1
#define MOST 1
#define S falling(x - m)
#define ROW (m - at(px + label)) + logarithm(s)
#define TOTAL total / rows
#elif OPERATION == 12 /* cross_entropy_smoothed */
#define LABELS 1
#define MOST 1
#define S falling(x - m)
#define T x - m
#define ROW logarithm(s) - 0.9f * (at(px + label) - m) - 0.1f * (t / columns)
#elif OPERATION == 13 /* cross_entropy_gradient */
#define LABELS 1
#define MOST 1
#define S falling(x - m)
#define SETUP const float scale = 1 / (s * rows);
#define KEPT kept * scale
#define EACH falling(x - m) * scale
#define AT_LABEL -(1.0f / rows)
#elif OPERATION == 14 /* cosine_distance */
#define MATRICES 2
#define S x * y
#define T x * x
#define U y * y
#define ROW 1 - s * (inverse_root(t > 1e-16f ? t : 1e-16f) * inverse_root(u > 1e-16f ? u : 1e-16f))
#elif OPERATION == 15 /* kl_divergence of logarithms */
#define MATRICES 2
#define S exponential(y) * (y - x)
#define ROW s
#define TOTAL total / rows
#endif

#ifndef MATRICES
#define MATRICES 1
#endif
#ifndef LABELS
#define LABELS 0
#endif
#ifndef WEIGHTS
#define WEIGHTS 0
#endif
#ifndef AFTER_S
#define AFTER_S
#endif
#if !defined(KEPT)
#undef KEEP
#define KEEP 0
#endif

struct call { int64_t rows, columns; const element *x, *y, *g, *h; const int64_t *label; element *out; float *numbers; };

/* The operands of LANES elements from j on; those an operation does not have are x again, and cost nothing. */
#define LOAD(j) \
    const vec x = load(px + (j)), y = load((MATRICES > 1 ? py : px) + (j)); \
    const vec g = load((WEIGHTS > 0 ? pg : px) + (j)), h = load((WEIGHTS > 1 ? ph : px) + (j)); \
    (void)x, (void)y, (void)g, (void)h;
#define LOAD_SOME(j, count) \
    const vec x = load_some(px + (j), count), y = load_some((MATRICES > 1 ? py : px) + (j), count); \
    const vec g = load_some((WEIGHTS > 0 ? pg : px) + (j), count), h = load_some((WEIGHTS > 1 ? ph : px) + (j), count); \
    (void)x, (void)y, (void)g, (void)h;

/* The sum of TERM over the row, which is also stored where WITH says so. */
#define SUM(RESULT, TERM, WITH) \
    do { \
        vec sums[UNROLL]; \
        for (int i = 0; i < UNROLL; ++i) sums[i] = every(0); \
        int64_t j = 0; \
        for (; j + UNROLL * LANES <= columns; j += UNROLL * LANES) \
            for (int i = 0; i < UNROLL; ++i) { \
                LOAD(j + i * LANES) \
                const vec term = TERM; \
                if (WITH) store(out + j + i * LANES, term); \
                sums[i] += term; \
            } \
        for (; j + LANES <= columns; j += LANES) { \
            LOAD(j) \
            const vec term = TERM; \
            if (WITH) store(out + j, term); \
            sums[0] += term; \
        } \
        if (j < columns) { \
            LOAD_SOME(j, columns - j) \
            const vec term = TERM; \
            if (WITH) store_some(out + j, term, columns - j); \
            sums[UNROLL - 1] += first_lanes(term, columns - j); \
        } \
        for (int step = 1; step < UNROLL; step *= 2) \
            for (int i = 0; i + step < UNROLL; i += 2 * step) sums[i] += sums[i + step]; \
        RESULT = sum_of(sums[0]); \
    } while (0)

static inline float row(const struct call *call, int64_t index) {
    const int64_t rows = call->rows, columns = call->columns, label = LABELS ? call->label[index] : 0;
    const element *px = call->x + index * columns, *py = call->y + index * columns, *pg = call->g, *ph = call->h;
    element *out = call->out + index * columns;
    float m = 0, s = 0, t = 0, u = 0;
    (void)rows, (void)label, (void)py, (void)pg, (void)ph, (void)out, (void)m, (void)s, (void)t, (void)u;
#ifdef MOST
    {
        vec most[UNROLL];
        for (int i = 0; i < UNROLL; ++i) most[i] = every(at(px));
        int64_t j = 0;
        for (; j + UNROLL * LANES <= columns; j += UNROLL * LANES)
            for (int i = 0; i < UNROLL; ++i) most[i] = larger(most[i], load(px + j + i * LANES));
        for (; j + LANES <= columns; j += LANES) most[0] = larger(most[0], load(px + j));
        if (j < columns) most[0] = larger(most[0], load_some(px + j, columns - j));
        for (int i = 1; i < UNROLL; ++i) most[0] = larger(most[0], most[i]);
        m = most_of(most[0]);
    }
#endif
    SUM(s, S, KEEP);
    AFTER_S
#ifdef T
    SUM(t, T, 0);
#endif
#ifdef U
    SUM(u, U, 0);
#endif
#ifdef ROW
    return ROW;
#else
    SETUP
    int64_t j = 0;
#if KEEP
    for (; j + LANES <= columns; j += LANES) {
        const vec kept = load(out + j);
        store(out + j, KEPT);
    }
    if (j < columns) {
        const vec kept = load_some(out + j, columns - j);
        store_some(out + j, KEPT, columns - j);
    }
#else
    for (; j + UNROLL * LANES <= columns; j += UNROLL * LANES)
        for (int i = 0; i < UNROLL; ++i) {
            LOAD(j + i * LANES)
            put(out + j + i * LANES, EACH);
        }
    for (; j + LANES <= columns; j += LANES) {
        LOAD(j)
        put(out + j, EACH);
    }
    if (j < columns) {
        LOAD_SOME(j, columns - j)
        store_some(out + j, EACH, columns - j);
    }
#endif
#ifdef AT_LABEL
    settle();
    set(out + label, falling(every(at(px + label) - m))[0] * scale + AT_LABEL);
#endif
    return 0;
#endif
}

static void some_rows(void *context, int64_t index) {
    const struct call *call = context;
    const int64_t end = (index + 1) * ROWS < call->rows ? (index + 1) * ROWS : call->rows;
    for (int64_t i = index * ROWS; i < end; ++i) {
        const float number = row(call, i);
#ifdef TOTAL
        call->numbers[i] = number;
#elif defined(ROW)
        set(call->out + i, number);
#else
        (void)number;
#endif
    }
    settle();
}

void by_rows(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t rows = sizes[0], columns = sizes[1];
    void *const *rest = buffers + MATRICES + LABELS;
    struct call call = {rows, columns, buffers[0], buffers[MATRICES - 1], rest[0], rest[WEIGHTS > 1], buffers[LABELS],
                        rest[WEIGHTS], workspace};
#ifdef TOTAL
    /* a number a row, added up in an order of its own */
    parallel_for((rows + ROWS - 1) / ROWS, some_rows, &call);
    float total = 0, lost = 0, plain = 0; /* Kahan's sum: rows are many, and their numbers of one sign */
    for (int64_t i = 0; i < rows; ++i) {
        const float next = call.numbers[i] - lost, sum = total + next;
        lost = (sum - total) - next;
        total = sum;
        plain += call.numbers[i];
    }
    if (total != total) total = plain; /* it makes NaN of infinity */
    set(call.out, TOTAL);
#else
    parallel_for((rows + ROWS - 1) / ROWS, some_rows, &call);
#endif
}
