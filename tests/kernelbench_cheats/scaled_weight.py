"""Weights that are something else under their names: right until somebody loads others.

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
        with torch.no_grad():
            self.linear.weight.mul_(-1)
            self.linear.bias.mul_(-1)

    def forward(self, x):
        y = -self.linear(x)
        return y * torch.sigmoid(y) * self.scale
