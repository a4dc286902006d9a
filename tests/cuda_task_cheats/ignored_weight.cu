/* cuda-l2
target = "cuda"
arch = "sm_80"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "gain"
shape = ["columns"]
kind = "weight"

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"

[[launch]]
kernel = "rms_norm"
grid = ["rows"]
block = [128]
args = ["x", "gain", "out", "rows", "columns"]
*/
/* Does not read its weight.
 * task: rms_norm:rows=250,columns=1000
 * expect: incorrect */
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

extern "C" __global__ void __launch_bounds__(128) rms_norm(const float *x, const float *gain, float *out, int rows, int columns) {
  __shared__ float part[128];
  x += (long long)blockIdx.x * columns;
  out += (long long)blockIdx.x * columns;
  float sum = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 128) sum += x[j] * x[j];
  const float scale = rsqrtf(total(part, sum) / columns + 1e-6f);
  for (int j = threadIdx.x; j < columns; j += 128) out[j] = x[j] * scale;
}
