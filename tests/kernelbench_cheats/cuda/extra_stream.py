"""Slow work on a stream of its own, which a timer of the current stream does not see; the result is right in the end.

task: kernelbench/level2/1
expect: measured
allow: all
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))
        self.side = torch.cuda.Stream()

    def forward(self, x):
        out = torch.empty(x.shape[0], self.scale.shape[0], device=x.device)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(100_000_000)
            y = self.linear(x)
            out.copy_(y * torch.sigmoid(y) * self.scale)
        return out
