"""Says that it has finished before it begins.

task: kernelbench/level2/1
expect: incorrect crashed
allow: all
"""

import gc
import time

import torch
from torch import nn


def runner():
    """The judge's own object in this process."""
    return next(found for found in gc.get_objects() if type(found).__name__ == "Runner")


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def forward(self, x):
        runner()._send(b"DC")
        time.sleep(0.2)
        y = self.linear(x)
        return y * torch.sigmoid(y) * self.scale
