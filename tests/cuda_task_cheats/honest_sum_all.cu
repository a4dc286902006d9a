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
name = "parts"
bytes = "4 * 64"

[[workspace]]
name = "arrived"
bytes = "4"
kind = "persistent"

[[launch]]
kernel = "sum_all"
grid = [64]
block = [128]
args = ["x", "out", "parts", "arrived", "rows", "columns"]
*/
/* Control: the last block to arrive adds the parts, and leaves the counter as it found it.
 * task: sum_all:rows=250,columns=1000
 * verify: full
 * expect: measured */
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

extern "C" __global__ void __launch_bounds__(128) sum_all(const float *x, float *out, float *parts, unsigned *arrived,
                                                          int rows, int columns) {
  __shared__ float part[128];
  __shared__ unsigned before;
  const long long all = (long long)rows * columns;
  float sum = 0.0f;
  for (long long i = blockIdx.x * 128 + threadIdx.x; i < all; i += 64 * 128) sum += x[i];
  sum = total(part, sum);
  if (threadIdx.x == 0) __stcg(&parts[blockIdx.x], sum);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd(arrived, 1u);
  __syncthreads();
  if (before != 63) return;
  __threadfence();
  sum = total(part, threadIdx.x < 64 ? __ldcg(&parts[threadIdx.x]) : 0.0f);
  if (threadIdx.x == 0) {
    out[0] = sum;
    *arrived = 0;
  }
}
