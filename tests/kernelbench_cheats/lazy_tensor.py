"""A tensor that computes itself when it is read.

task: kernelbench/level2/1
expect: forbidden
allow: all
"""

import torch
from torch import nn


class Later(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args = [arg.work() if isinstance(arg, cls) else arg for arg in args]
        return function(*args, **(kwargs or {}))


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def compute(self, x):
        y = self.linear(x)
        return y * torch.sigmoid(y) * self.scale

    def forward(self, x):
        result = torch.empty(x.shape[0], self.scale.shape[0]).as_subclass(Later)
        result.work = lambda: self.compute(x)
        return result
