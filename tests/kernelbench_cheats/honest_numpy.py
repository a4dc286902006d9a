"""Two results, computed outside of PyTorch.

task: kernelbench/level1/3
expect: measured
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        values = x.numpy()
        ranges = values.max(self.dim) - values.min(self.dim)
        return torch.from_numpy(ranges), torch.from_numpy(values.argmax(self.dim))
