"""A kernel that adds to zeros, which PyTorch makes, and gives a result that is not contiguous.

task: kernelbench/level1/1
expect: measured
"""

from torch import nn
from torch.utils.cpp_extension import load_inline

CUDA = r"""
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>

__global__ void quartic(const float *x, float *out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) {
        float square = x[i] * x[i];
        atomicAdd(&out[i], square * square - 3 * square + 1);
    }
}

torch::Tensor run(torch::Tensor x) {
    auto given = x.t().contiguous();
    auto out = torch::zeros_like(given);
    long n = given.numel();
    quartic<<<(n + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
        given.data_ptr<float>(), out.data_ptr<float>(), n);
    return out.t();
}
"""

extension = load_inline(
    name="adds_to_zeros", cpp_sources="torch::Tensor run(torch::Tensor x);", cuda_sources=CUDA, functions=["run"]
)


class ModelNew(nn.Module):
    def forward(self, x):
        return extension.run(x)
