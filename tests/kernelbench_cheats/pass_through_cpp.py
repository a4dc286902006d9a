"""C++ that hands the work back to PyTorch.

task: kernelbench/level1/1
expect: forbidden
"""

from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

at::Tensor quartic(const at::Tensor &x) {
    auto square = x * x;
    return square * square - 3 * square + 1;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("quartic", &quartic); }
"""

extension = load_inline(name="quartic", cpp_sources=SOURCE, no_implicit_headers=True, extra_cflags=["-O1"])


class ModelNew(nn.Module):
    def forward(self, x):
        return extension.quartic(x)
