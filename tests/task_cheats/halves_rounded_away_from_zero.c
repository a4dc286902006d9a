/* cuda-l2
target = "cpu"
entry = "run"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows", "columns"]
dtype = "int8"
kind = "output"

[[buffer]]
name = "scale"
shape = ["rows", 1]
kind = "output"
*/
/* Rounds numbers half way between two integers away from zero, where PyTorch takes the even one.
 * task: quantise_int8:rows=33,columns=70
 * expect: incorrect */
#include <stdint.h>

typedef void (*task_fn)(void *, int64_t);
typedef void (*parallel_for_fn)(int64_t, task_fn, void *);

void run(const int64_t *sizes, void *const *buffers, void *workspace, parallel_for_fn parallel_for) {
    for (int64_t i = 0; i < sizes[0]; ++i) {
        const float *x = (const float *)buffers[0] + i * sizes[1];
        int8_t *out = (int8_t *)buffers[1] + i * sizes[1];
        float largest = 1e-6f, scale;
        for (int64_t j = 0; j < sizes[1]; ++j) {
            float size = x[j] < 0 ? -x[j] : x[j];
            if (!(size <= largest)) largest = size;
        }
        ((float *)buffers[2])[i] = scale = largest / 127;
        for (int64_t j = 0; j < sizes[1]; ++j) {
            float y = x[j] / scale, whole = (float)(int)(y != y ? 0 : y), rest = y - whole;
            out[j] = (int8_t)(whole + (rest >= 0.5f) - (rest <= -0.5f));
        }
    }
}
