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
kernel = "clear"
grid = [1]
block = [1]
args = ["sum"]

[[launch]]
kernel = "add"
grid = ["rows"]
block = [128]
args = ["x", "sum", "rows", "columns"]

[[launch]]
kernel = "copy"
grid = [1]
block = [1]
args = ["sum", "out"]
*/
/* Blocks add to one sum without atomics.
 * task: sum_all:rows=250,columns=1000
 * expect: incorrect imprecise unhygienic */
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

extern "C" __global__ void clear(float *sum) { sum[0] = 0.0f; }

extern "C" __global__ void __launch_bounds__(128) add(const float *x, float *sum, int rows, int columns) {
  __shared__ float part[128];
  float own = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 128) own += x[(long long)blockIdx.x * columns + j];
  own = total(part, own);
  if (threadIdx.x == 0) sum[0] += own;
}

extern "C" __global__ void copy(const float *sum, float *out) { out[0] = sum[0]; }
