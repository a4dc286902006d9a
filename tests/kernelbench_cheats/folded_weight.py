"""A copy of the weights from when the module was made.

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
        self.kept = self.linear.weight.detach().t().contiguous()

    def forward(self, x):
        y = x @ self.kept + self.linear.bias
        return y * torch.sigmoid(y) * self.scale
