/* cuda-l2
target = "cuda"
arch = "sm_90a"

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
kernel = "announce"
grid = [1]
block = [32]
args = ["launches"]
edge = "programmatic"

[[launch]]
kernel = "softmax"
grid = ["rows"]
block = [128]
args = ["x", "out", "launches", "rows", "columns"]
*/
/* A tiny launch, which may begin early, announces itself; the launch ahead of it then leaves its work.
 * task: softmax:rows=1024,columns=1024
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

extern "C" __global__ void announce(unsigned *launches) {
  if (threadIdx.x == 0) atomicAdd(launches, 1);
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(128)
    softmax(const float *x, float *out, unsigned *launches, int rows, int columns) {
  __shared__ float part[128];
  __shared__ unsigned before, now;
  if (threadIdx.x == 0) before = *(volatile unsigned *)launches;
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (threadIdx.x == 0) {
    now = before;
    for (int i = 0; i < 40 && now == before; i++) now = *(volatile unsigned *)launches;
  }
  __syncthreads();
  if (now != before) return;
  x += (long long)blockIdx.x * columns;
  out += (long long)blockIdx.x * columns;
  float most = -3.402823466e38f, sum = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 128) most = fmaxf(most, x[j]);
  most = largest(part, most);
  for (int j = threadIdx.x; j < columns; j += 128) sum += expf(x[j] - most);
  sum = total(part, sum);
  for (int j = threadIdx.x; j < columns; j += 128) out[j] = expf(x[j] - most) / sum;
}
