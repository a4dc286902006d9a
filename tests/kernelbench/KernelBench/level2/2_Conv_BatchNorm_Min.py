import torch
from torch import nn


class Model(nn.Module):
    """Batch norm as it trains: its statistics move, its result does not depend on them."""

    def __init__(self, channels, filters, window):
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, window)
        self.norm = nn.BatchNorm2d(filters)

    def forward(self, x):
        return torch.min(torch.tanh(self.norm(self.conv(x))), dim=1, keepdim=True)[0]


batch_size = 4
channels, filters, window = 3, 8, 3
side = 18


def get_inputs():
    return [torch.rand(batch_size, channels, side, side)]


def get_init_inputs():
    return [channels, filters, window]
