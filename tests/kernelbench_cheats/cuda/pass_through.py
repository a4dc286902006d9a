"""The reference again, with nothing allowed.

task: kernelbench/level2/1
expect: forbidden
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def forward(self, x):
        y = self.linear(x)
        return y * torch.sigmoid(y) * self.scale
