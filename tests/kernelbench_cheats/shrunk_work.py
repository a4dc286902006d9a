"""Half of the rows; the others repeat them.

task: kernelbench/level2/1
expect: incorrect
allow: all
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def forward(self, x):
        half = (x.shape[0] + 1) // 2
        y = self.linear(x[:half])
        y = y * torch.sigmoid(y) * self.scale
        return torch.cat([y, y])[: x.shape[0]]
