"""C++ that hands the work back to PyTorch.

task: kernelbench/level1/1
expect: forbidden
"""

from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <torch/extension.h>
#include <cmath>

torch::Tensor quartic(torch::Tensor x) {
    auto square = x * x;
    return square * square - 3 * square + 1;
}
"""

extension = load_inline(name="quartic", cpp_sources=SOURCE, functions=["quartic"], extra_cflags=["-O2"])


class ModelNew(nn.Module):
    def forward(self, x):
        return extension.quartic(x)
