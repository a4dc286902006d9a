"""Prints ten megabytes a call, which are kept nowhere: right, and as slow as that is.

task: kernelbench/level2/1
expect: measured
allow: all
"""

import os
import sys

import torch
from torch import nn

LINE = b"so much to say about so little\n" * (10_000_000 // 31)


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def forward(self, x):
        print(LINE.decode())
        os.write(sys.stderr.fileno(), LINE)
        if os.fstat(1).st_size or os.fstat(2).st_size:
            raise ValueError("it is kept, and fills a disk")
        return nn.functional.silu(self.linear(x)) * self.scale
