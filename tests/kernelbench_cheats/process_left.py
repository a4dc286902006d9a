"""A process that stays.

task: kernelbench/level2/1
expect: forbidden
allow: all
"""

import os
import time

import torch
from torch import nn

if not os.fork():
    os.setsid()
    os.closerange(0, 256)
    time.sleep(3600)
    os._exit(0)


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def forward(self, x):
        y = self.linear(x)
        return y * torch.sigmoid(y) * self.scale
