/* cuda-l2
target = "cuda"
arch = "sm_80"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"

[[launch]]
kernel = "softmax"
grid = ["rows"]
block = [128]
args = ["x", "out", "rows", "columns"]
*/
/* Every row the same.
 * task: softmax:rows=250,columns=1000
 * expect: incorrect */
extern "C" __global__ void __launch_bounds__(128) softmax(const float *x, float *out, int rows, int columns) {
  for (int j = threadIdx.x; j < columns; j += 128) out[(long long)blockIdx.x * columns + j] = 1.0f / columns;
}
