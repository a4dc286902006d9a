import torch
from torch import nn


class Model(nn.Module):
    """Its way depends on its values: it cannot be cut into parts."""

    def __init__(self, features):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.abs().mean() < 0.1:
                break
        return x


def get_inputs():
    return [torch.rand(4, 32)]


def get_init_inputs():
    return [32]
