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
block = [256]
args = ["x", "out", "rows", "columns"]
*/
/* Subtracts the largest of every second element: NaN where one between stands far above all those.
 * task: softmax:rows=4096,columns=2048:float32
 * because: on (large|wide) values
 * expect: incorrect */
__device__ __forceinline__ float whole_sum(float v, float *s) {
  for (int step = 16; step; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0.0f;
  for (int i = 0; i < 8; i++) v += s[i];
  return v;
}
__device__ __forceinline__ float whole_max(float v, float *s) {
  for (int step = 16; step; step /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
  __syncthreads();
  v = s[0];
  for (int i = 1; i < 8; i++) v = fmaxf(v, s[i]);
  return v;
}
extern "C" __global__ void __launch_bounds__(256) softmax(const float *x, float *out, int rows, int columns) {
  __shared__ float s[8];
  const float *row = x + (long long)blockIdx.x * columns;
  float *to = out + (long long)blockIdx.x * columns;
  float most = row[0];
  for (int j = threadIdx.x * 2; j < columns; j += 512) most = fmaxf(most, row[j]);
  most = whole_max(most, s);
  float sum = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 256) sum += expf(row[j] - most);
  sum = whole_sum(sum, s);
  for (int j = threadIdx.x; j < columns; j += 256) to[j] = expf(row[j] - most) / sum;
}
