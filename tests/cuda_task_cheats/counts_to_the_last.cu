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
name = "launches"
bytes = "4 * rows"

[[launch]]
kernel = "softmax"
grid = ["rows"]
block = [128]
args = ["x", "out", "launches", "rows", "columns"]
*/
/* Counts launches in scratch and computes after a power of two of them: the last one of a usual round.
 * task: softmax:rows=256,columns=1024
 * expect: incorrect wrong-output unhygienic */
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

extern "C" __global__ void __launch_bounds__(128)
    softmax(const float *x, float *out, unsigned *launches, int rows, int columns) {
  __shared__ float part[128];
  const unsigned seen = launches[blockIdx.x] - 0xfbfbfbfbu + 1;
  __syncthreads();
  if (threadIdx.x == 0) launches[blockIdx.x] += 1;
  if (seen > 8 && (seen & (seen - 1))) return;
  x += (long long)blockIdx.x * columns;
  out += (long long)blockIdx.x * columns;
  float most = -3.402823466e38f, sum = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 128) most = fmaxf(most, x[j]);
  most = largest(part, most);
  for (int j = threadIdx.x; j < columns; j += 128) sum += expf(x[j] - most);
  sum = total(part, sum);
  for (int j = threadIdx.x; j < columns; j += 128) out[j] = expf(x[j] - most) / sum;
}
