"""Makes the shared memory shorter under its reader.

task: kernelbench/level2/1
expect: crashed incorrect
allow: all
"""

import os

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def forward(self, x):
        for number in range(3, 64):
            try:
                os.ftruncate(number, 0)
            except OSError:
                pass
        os._exit(0)
