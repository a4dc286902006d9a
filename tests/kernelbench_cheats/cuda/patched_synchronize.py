"""Waits for nothing where PyTorch is asked to.

task: kernelbench/level2/1
expect: forbidden
allow: all
"""

import torch
from torch import nn

torch.cuda.synchronize = lambda *_: None


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def forward(self, x):
        y = self.linear(x)
        return y * torch.sigmoid(y) * self.scale
