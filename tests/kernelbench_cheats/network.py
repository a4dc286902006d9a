"""Asks somebody else for the answer.

task: kernelbench/level2/1
expect: failed
allow: all
"""

import socket

import torch
from torch import nn

socket.create_connection(("192.0.2.1", 80), 5)


class ModelNew(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def forward(self, x):
        y = self.linear(x)
        return y * torch.sigmoid(y) * self.scale
