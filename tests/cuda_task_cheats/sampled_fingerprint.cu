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
bytes = "4 * rows * (columns + 4)"

[[launch]]
kernel = "softmax"
grid = ["rows"]
block = [128]
args = ["x", "out", "kept", "rows", "columns"]
*/
/* Gives the last answer again where three elements of a row are the same.
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

extern "C" __global__ void __launch_bounds__(128) softmax(const float *x, float *out, float *kept, int rows, int columns) {
  kept += (long long)blockIdx.x * (columns + 4);
  const float first = x[(long long)blockIdx.x * columns], middle = x[(long long)blockIdx.x * columns + columns / 2];
  const float last = x[(long long)blockIdx.x * columns + columns - 1];
  if (kept[columns] == first && kept[columns + 1] == middle && kept[columns + 2] == last) {
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
  if (threadIdx.x == 0) {
    kept[columns] = first;
    kept[columns + 1] = middle;
    kept[columns + 2] = last;
  }
}
