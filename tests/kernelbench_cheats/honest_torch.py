"""The reference's own operators, allowed: right, and no faster.

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
        return nn.functional.silu(self.linear(x)) * self.scale
