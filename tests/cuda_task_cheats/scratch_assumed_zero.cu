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

[[workspace]]
name = "sum"
bytes = "4"

[[launch]]
kernel = "add"
grid = [1]
block = [128]
args = ["x", "sum", "out", "rows", "columns"]
*/
/* Takes scratch for zero.
 * task: sum_all:rows=250,columns=1000
 * expect: incorrect unhygienic */
// The sum of a block's values, for every thread of it.
static __device__ float total(float *part, float value) {
  const int t = threadIdx.x;
  part[t] = value;
  __syncthreads();
  for (int step = 64; step > 0; step /= 2) {
    if (t < step) part[t] += part[t + step];
    __syncthreads();
  }
  const float found = part[0];
  __syncthreads();
  return found;
}

extern "C" __global__ void __launch_bounds__(128) add(const float *x, float *sum, float *out, int rows, int columns) {
  __shared__ float part[128];
  float own = 0.0f;
  for (int i = threadIdx.x; i < rows * columns; i += 128) own += x[i];
  own = total(part, own);
  if (threadIdx.x == 0) out[0] = sum[0] + own;
}
