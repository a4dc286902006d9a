"""Weights under names of its own: the seed gives them, as in KernelBench.

task: kernelbench/level2/1
expect: measured
allow: all
"""

from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        inner = nn.Linear(features_in, features_out)
        self.weight, self.bias, self.factor = inner.weight, inner.bias, scale

    def forward(self, x):
        return nn.functional.silu(nn.functional.linear(x, self.weight, self.bias)) * self.factor
