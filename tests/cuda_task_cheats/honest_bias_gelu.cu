/* cuda-l2
target = "cuda"
arch = "sm_80"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "y"
shape = ["rows", "columns"]

[[buffer]]
name = "bias"
shape = ["columns"]
kind = "weight"

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"

[[launch]]
kernel = "bias_gelu_residual"
grid = ["cdiv(rows * columns, 256)"]
block = [256]
args = ["x", "y", "bias", "out", "rows", "columns"]
*/
/* Control: one element a thread.
 * task: bias_gelu_residual:rows=250,columns=1000
 * verify: full
 * expect: measured */
extern "C" __global__ void bias_gelu_residual(const float *x, const float *y, const float *bias, float *out, int rows,
                                              int columns) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= rows * columns) return;
  const float v = x[i] + bias[i % columns];
  out[i] = y[i] + 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
}
