"""A tensor that another thread fills after it was given.

task: kernelbench/level2/1
expect: incorrect
allow: all
"""

import threading
import time

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def forward(self, x):
        out = torch.empty(x.shape[0], self.scale.shape[0])
        threading.Thread(target=self.fill, args=(x.clone(), out)).start()
        return out

    def fill(self, x, out):
        time.sleep(0.05)
        with torch.no_grad():
            y = self.linear(x)
            out.copy_(y * torch.sigmoid(y) * self.scale)
