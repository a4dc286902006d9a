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
/* Computes no more columns than it was shown: right at all smaller sizes.
 * task: softmax:rows=250,columns=1000
 * expect: incorrect */
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

extern "C" __global__ void __launch_bounds__(128) softmax(const float *x, float *out, int rows, int columns) {
  __shared__ float part[128];
  x += (long long)blockIdx.x * columns;
  out += (long long)blockIdx.x * columns;
  columns = columns < 1000 ? columns : 1000;
  float most = -3.402823466e38f, sum = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 128) most = fmaxf(most, x[j]);
  most = largest(part, most);
  for (int j = threadIdx.x; j < columns; j += 128) sum += expf(x[j] - most);
  sum = total(part, sum);
  for (int j = threadIdx.x; j < columns; j += 128) out[j] = expf(x[j] - most) / sum;
}
