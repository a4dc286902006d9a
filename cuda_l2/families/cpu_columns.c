/* Kernels that reduce each column of a matrix of floats: sums, means and largest elements.
 *
 * Set from outside: OPERATION (below), VECTOR_BITS, UNROLL (vectors of neighbouring columns), BLOCK (columns a task), PARTS
 * (of the rows, reduced apart and put together afterwards). Sums are taken of CHUNK rows, then of such sums. */
#define DEGREE 6
#define STREAM 0
#define ELEMENT 0
#include "cpu_vectors.h"

#define CHUNK 64
#if OPERATION == 0 /* sum_columns */
#define START every(0)
#define JOIN(so_far, x) ((so_far) + (x))
#define FINISH(value) (value)
#elif OPERATION == 1 /* mean_columns */
#define START every(0)
#define JOIN(so_far, x) ((so_far) + (x))
#define FINISH(value) ((value) / (float)rows)
#elif OPERATION == 2 /* max_columns; NaN wins, whichever side it is on */
#define START every(-__builtin_inff())
#define JOIN(so_far, x) most(so_far, x)
#define FINISH(value) (value)
static inline vec most(vec so_far, vec x) { return choose(x != x, x, larger(x, so_far)); }
#endif

struct call { int64_t rows, columns; const float *x; float *out; };

/* The rows from `first` to before `end` of `COUNT` vectors of columns at x, which `LOAD` reads. */
#define REDUCE(total, COUNT, LOAD) \
    do { \
        for (int u = 0; u < COUNT; ++u) total[u] = START; \
        for (int64_t chunk = first; chunk < end; chunk += CHUNK) { \
            const int64_t last = chunk + CHUNK < end ? chunk + CHUNK : end; \
            vec some[COUNT]; \
            for (int u = 0; u < COUNT; ++u) some[u] = START; \
            for (int64_t i = chunk; i < last; ++i) \
                for (int u = 0; u < COUNT; ++u) some[u] = JOIN(some[u], LOAD(x + i * columns + u * LANES)); \
            for (int u = 0; u < COUNT; ++u) total[u] = JOIN(total[u], some[u]); \
        } \
    } while (0)

/* Columns from `column` to before `stop` over some of the rows of a matrix; `rows`, where not 0, finishes them. */
static void reduce(const float *matrix, int64_t columns, int64_t first, int64_t end, int64_t column, int64_t stop,
                   int64_t rows, float *out) {
    vec total[UNROLL];
    for (; column + UNROLL * LANES <= stop; column += UNROLL * LANES) {
        const float *x = matrix + column;
        REDUCE(total, UNROLL, load);
        for (int u = 0; u < UNROLL; ++u) store(out + column + u * LANES, rows ? FINISH(total[u]) : total[u]);
    }
    for (; column < stop; column += LANES) {
        const float *x = matrix + column;
        const int64_t left = stop - column < LANES ? stop - column : LANES;
#define LOAD_LEFT(from) load_some(from, left)
        REDUCE(total, 1, LOAD_LEFT);
        store_some(out + column, rows ? FINISH(total[0]) : total[0], left);
    }
}

static void some_columns(void *context, int64_t index) {
    const struct call *call = context;
    const int64_t part = index % PARTS, column = index / PARTS * BLOCK;
    const int64_t stop = column + BLOCK < call->columns ? column + BLOCK : call->columns;
    const int64_t first = call->rows * part / PARTS, end = call->rows * (part + 1) / PARTS;
    reduce(call->x, call->columns, first, end, column, stop, PARTS > 1 ? 0 : call->rows, call->out + part * call->columns);
}

void by_columns(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t rows = sizes[0], columns = sizes[1];
    struct call call = {rows, columns, buffers[0], PARTS > 1 ? workspace : buffers[1]};
    parallel_for((columns + BLOCK - 1) / BLOCK * PARTS, some_columns, &call);
    if (PARTS > 1) reduce(workspace, columns, 0, PARTS, 0, columns, rows, buffers[1]);
}
