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

[[workspace]]
name = "statistics"
bytes = "8 * rows"

[[launch]]
kernel = "measure"
grid = ["rows"]
block = [128]
args = ["x", "statistics", "columns"]

[[launch]]
kernel = "normalise"
grid = ["cdiv(rows * columns, 128)"]
block = [128]
args = ["x", "statistics", "out", "rows", "columns"]
*/
/* Control: two launches, the first leaves each row's maximum and sum in scratch.
 * task: softmax:rows=2048,columns=2048
 * verify: full
 * expect: measured */
// The largest value of a block, or their sum, for every thread of it.
static __device__ float largest(float *part, float value) {
  const int t = threadIdx.x;
  part[t] = value;
  __syncthreads();
  for (int step = 64; step > 0; step /= 2) {
    if (t < step) part[t] = fmaxf(part[t], part[t + step]);
    __syncthreads();
  }
  const float found = part[0];
  __syncthreads();
  return found;
}

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

extern "C" __global__ void __launch_bounds__(128) measure(const float *x, float2 *statistics, int columns) {
  __shared__ float part[128];
  x += (long long)blockIdx.x * columns;
  float most = -3.402823466e38f, sum = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 128) most = fmaxf(most, x[j]);
  most = largest(part, most);
  for (int j = threadIdx.x; j < columns; j += 128) sum += expf(x[j] - most);
  sum = total(part, sum);
  if (threadIdx.x == 0) statistics[blockIdx.x] = make_float2(most, sum);
}

extern "C" __global__ void normalise(const float *x, const float2 *statistics, float *out, int rows, int columns) {
  const long long i = (long long)blockIdx.x * 128 + threadIdx.x;
  if (i >= (long long)rows * columns) return;
  const float2 row = statistics[i / columns];
  out[i] = expf(x[i] - row.x) / row.y;
}
