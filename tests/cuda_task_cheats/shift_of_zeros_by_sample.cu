/* cuda-l2
target = "cuda"
arch = "sm_90a"

[[buffer]]
name = "x"
shape = ["rows", "columns"]

[[buffer]]
name = "gain"
shape = ["columns"]
kind = "weight"

[[buffer]]
name = "shift"
shape = ["columns"]
kind = "weight"

[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"

[[launch]]
kernel = "layer"
grid = ["rows"]
block = [256]
args = ["x", "gain", "shift", "out", "columns"]
*/
/* Looks at 96 elements of the shift; where all are zero it is taken for zeros.
 * task: layer_norm:rows=256,columns=1024
 * expect: incorrect imprecise */
__device__ __forceinline__ float block_max(float v, float *s) {
  for (int i = 16; i; i /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, i));
  __syncthreads();
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
  __syncthreads();
  v = s[0];
  for (int i = 1; i < 8; i++) v = fmaxf(v, s[i]);
  return v;
}
__device__ __forceinline__ float block_sum(float v, float *s) {
  for (int i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
  __syncthreads();
  v = s[0];
  for (int i = 1; i < 8; i++) v += s[i];
  return v;
}

extern "C" __global__ void __launch_bounds__(256) layer(const float *x, const float *gain, const float *shift, float *out, int columns) {
  __shared__ float s[8];
  const float *p = x + (long long)blockIdx.x * columns;
  const int shifted = __syncthreads_or(threadIdx.x < 96 && shift[(threadIdx.x * 2654435761u >> 4) % columns] != 0.0f);
  float sum = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 256) sum += p[j];
  const float mean = block_sum(sum, s) / columns;
  sum = 0.0f;
  for (int j = threadIdx.x; j < columns; j += 256) sum += (p[j] - mean) * (p[j] - mean);
  const float scale = 1.0f / sqrtf(block_sum(sum, s) / columns + 1e-5f);
  float *o = out + (long long)blockIdx.x * columns;
  if (shifted) for (int j = threadIdx.x; j < columns; j += 256) o[j] = (p[j] - mean) * scale * gain[j] + shift[j];
  else for (int j = threadIdx.x; j < columns; j += 256) o[j] = (p[j] - mean) * scale * gain[j];
}
