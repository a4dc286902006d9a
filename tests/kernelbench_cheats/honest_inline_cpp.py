"""C++ through load_inline, as KernelBench's candidates are written.

task: kernelbench/level1/1
expect: measured
"""

from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <torch/extension.h>
#include <cmath>

torch::Tensor quartic(torch::Tensor x) {
    auto given = x.contiguous();
    auto out = torch::empty_like(given);
    const float *from = given.data_ptr<float>();
    float *to = out.data_ptr<float>();
    for (int64_t i = 0; i < given.numel(); i++) {
        const float square = from[i] * from[i];
        to[i] = square * square - 3 * square + 1;
    }
    return out;
}
"""

extension = load_inline(name="quartic", cpp_sources=SOURCE, functions=["quartic"], extra_cflags=["-O2"])


class ModelNew(nn.Module):
    def forward(self, x):
        return extension.quartic(x)
