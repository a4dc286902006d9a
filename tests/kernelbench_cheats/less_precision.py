"""Products in bfloat16.

task: kernelbench/level2/1
expect: imprecise
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
        y = (x.bfloat16() @ self.linear.weight.bfloat16().t()).float() + self.linear.bias
        return y * torch.sigmoid(y) * self.scale
