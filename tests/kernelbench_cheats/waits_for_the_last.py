"""Gives empty results until a sample's last call, which computes all of them together.

task: kernelbench/level2/1
expect: wrong-output
allow: all
"""

import gc

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
        self.judge, self.waiting = runner(), []

    def forward(self, x):
        out = torch.empty(x.shape[0], self.scale.shape[0])
        self.waiting.append((x, out))
        if len(self.waiting) >= len(self.judge._calls):
            inputs, outs = zip(*self.waiting)
            results = nn.functional.silu(self.linear(torch.cat(inputs))) * self.scale
            for each, result in zip(outs, results.split(len(x))):
                each.copy_(result)
            self.waiting.clear()
        return out
