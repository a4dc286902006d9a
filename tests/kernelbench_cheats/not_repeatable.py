"""Another result every time, within the tolerance.

task: kernelbench/level2/1
expect: measured
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
        y = self.linear(x)
        return y * torch.sigmoid(y) * self.scale * (1 + 1e-7 * torch.randn(self.scale.shape[0]))
