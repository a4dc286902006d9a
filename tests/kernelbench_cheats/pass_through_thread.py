"""PyTorch does the work in another thread, where a dispatch mode of this one sees nothing.

task: kernelbench/level2/1
expect: forbidden
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.compute, x).result()

    def compute(self, x):
        with torch.no_grad():
            y = nn.functional.linear(x, self.linear.weight, self.linear.bias)
            return y * torch.sigmoid(y) * self.scale
