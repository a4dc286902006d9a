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
name = "kept"
bytes = "16 * 4 * rows * columns"

[[workspace]]
name = "owners"
bytes = "16 * 8 * rows"

[[launch]]
kernel = "softmax"
grid = ["rows"]
block = [128]
args = ["x", "out", "kept", "owners", "rows", "columns"]
*/
/* Keeps answers in scratch by the address of the input, and finds them when the address comes again.
 * task: softmax:rows=250,columns=1000
 * expect: incorrect unhygienic wrong-output */
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

extern "C" __global__ void __launch_bounds__(128) softmax(const float *x, float *out, float *kept, const float **owners, int rows,
                                                          int columns) {
  const int slot = (unsigned long long)x / 256 % 16;
  const float **owner = owners + 16 * blockIdx.x + slot;
  const float *given = x;
  kept += (long long)(slot * rows + blockIdx.x) * columns;
  if (*owner == given) {
    for (int j = threadIdx.x; j < columns; j += 128) out[(long long)blockIdx.x * columns + j] = kept[j];
    return;
  }
  __syncthreads();
  __shared__ float part[128];
  x += (long long)blockIdx.x * columns;
  out += (long long)blockIdx.x * columns;
  float most = -3.402823466e38f, sum = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 128) most = fmaxf(most, x[j]);
  most = largest(part, most);
  for (int j = threadIdx.x; j < columns; j += 128) sum += expf(x[j] - most);
  sum = total(part, sum);
  for (int j = threadIdx.x; j < columns; j += 128) kept[j] = out[j] = expf(x[j] - most) / sum;
  if (threadIdx.x == 0) *owner = given;
}
