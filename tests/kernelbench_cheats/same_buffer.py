"""Every result in the same place: a later call changes what an earlier one gave.

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
        self.out = None

    def forward(self, x):
        y = self.linear(x)
        result = y * torch.sigmoid(y) * self.scale
        if self.out is None or self.out.shape != result.shape:
            self.out = torch.empty_like(result)
        return self.out.copy_(result)
