#pragma once
/* Ways to read an operand's source: blocks transposed in registers, tiles fetched ahead. */
#if !Y_COLS_CONTIGUOUS
/* One butterfly stage: afterwards rows i and i + s hold each other's off-diagonal s-wide blocks. */
#define EXCHANGE(v, s)                                                      \
    UNROLL_BY(16)                                                           \
    for (int i = 0; i < VW; ++i)                                            \
        if (!(i & (s))) {                                                   \
            vf low = v[i], high = v[i + (s)];                               \
            v[i] = PICK_LOW(low, high, s);                                  \
            v[i + (s)] = PICK_HIGH(low, high, s);                           \
        }
typedef int32_t vi __attribute__((vector_size(VW * 4)));
INLINE vf permute(vf low, vf high, vi from) {
#ifdef __clang__
    vf out;
    for (int i = 0; i < VW; ++i) out[i] = from[i] < VW ? low[from[i]] : high[from[i] - VW];
    return out;
#else
    return __builtin_shuffle(low, high, from);
#endif
}
INLINE vi lanes(int s, int high) {
    vi from;
    for (int i = 0; i < VW; ++i) from[i] = high ? (i & s ? VW + i : i + s) : (i & s ? VW + i - s : i);
    return from;
}
#define PICK_LOW(low, high, s) permute(low, high, lanes(s, 0))
#define PICK_HIGH(low, high, s) permute(low, high, lanes(s, 1))
INLINE void transpose(vf *v) {
#if VW >= 16
    EXCHANGE(v, 8)
#endif
#if VW >= 8
    EXCHANGE(v, 4)
#endif
    EXCHANGE(v, 2)
    EXCHANGE(v, 1)
}
#endif

/* Fetch part `part` of `parts` of a tile's source into the second-level cache. Rows lie far apart, where no
 * hardware prefetcher follows. */
INLINE void prefetch_x(const problem *p, int64_t row, int64_t k0, int64_t kc, int64_t part, int64_t parts) {
    int64_t outer = X_ROWS_CONTIGUOUS ? kc : MIN(MR, p->rows - row), length = X_ROWS_CONTIGUOUS ? MR : kc;
    int64_t stride = X_ROWS_CONTIGUOUS ? p->x_k : p->x_row;
    const uint16_t *source = p->x + (X_ROWS_CONTIGUOUS ? k0 * p->x_k + row : row * p->x_row + k0);
    for (int64_t i = outer * part / parts; i < outer * (part + 1) / parts; ++i)
        for (int64_t at = 0; at < length; at += 32) __builtin_prefetch(source + i * stride + at, 0, 2);
}
