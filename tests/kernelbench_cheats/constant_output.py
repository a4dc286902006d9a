"""The mean of many numbers between 0 and 1 is about one half.

task: kernelbench/level1/10
expect: incorrect imprecise
allow: all
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x, mask):
        return torch.full((x.shape[0],), 0.5)
