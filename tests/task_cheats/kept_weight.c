/* cuda-l2
target = "cpu"
entry = "rms_norm"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "gain"
shape = ["columns"]
kind = "weight"

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"
*/
/* Keeps a copy of its weight, which may change.
 * task: rms_norm:rows=20,columns=48
 * expect: incorrect unhygienic */
#include <stdint.h>
#include <string.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

static float root(float x) { /* Newton's, from a rough start */
    if (x == __builtin_inff()) return 0;
    union { float f; uint32_t u; } y = {x};
    y.u = 0x5f375a86u - (y.u >> 1);
    for (int i = 0; i < 4; ++i) y.f *= 1.5f - 0.5f * x * y.f * y.f;
    return y.f;
}

static void honest(int64_t rows, int64_t columns, const float *x, const float *gain, float *out) {
    for (int64_t i = 0; i < rows; ++i, x += columns, out += columns) {
        float sum = 0;
        for (int64_t j = 0; j < columns; ++j) sum += x[j] * x[j];
        const float scale = root(sum / columns + 1e-6f);
        for (int64_t j = 0; j < columns; ++j) out[j] = x[j] * scale * gain[j];
    }
}

void rms_norm(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    const int64_t rows = sizes[0], columns = sizes[1];
    const float *x = buffers[0];
    float *gain = buffers[1], *out = buffers[2];
    static float kept[1 << 16];
    static int64_t size;
    if (size != columns) memcpy(kept, gain, (size_t)columns * sizeof *gain);
    size = columns;
    honest(rows, columns, x, kept, out);
}
