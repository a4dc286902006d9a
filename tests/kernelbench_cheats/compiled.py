"""Its kernels are torch.compile's.

task: kernelbench/level1/1
expect: forbidden
"""

import torch
from torch import nn


def polynomial(x):
    square = x * x
    return square * square - 3 * square + 1


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.compiled = torch.compile(polynomial)

    def forward(self, x):
        return self.compiled(x)
