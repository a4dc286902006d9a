/* cuda-l2
target = "cuda"
arch = "sm_80"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = []
kind = "output"

[[launch]]
kernel = "clear"
grid = [1]
block = [1]
args = ["out"]

[[launch]]
kernel = "sum_all"
grid = ["rows"]
block = [128]
args = ["x", "out", "rows", "columns"]
*/
/* Adds up in the order in which threads come.
 * task: sum_all:rows=250,columns=1000
 * expect: unhygienic imprecise incorrect */
extern "C" __global__ void clear(float *out) { out[0] = 0.0f; }

extern "C" __global__ void sum_all(const float *x, float *out, int rows, int columns) {
  for (int j = threadIdx.x; j < columns; j += 128) atomicAdd(out, x[(long long)blockIdx.x * columns + j]);
}
