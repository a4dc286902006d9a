import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, features_in, features_out, scale):
        super().__init__()
        self.linear = nn.Linear(features_in, features_out)
        self.scale = nn.Parameter(torch.full((features_out,), scale))

    def forward(self, x):
        x = self.linear(x)
        return x * torch.sigmoid(x) * self.scale


batch_size = 64
features_in, features_out = 128, 96


def get_inputs():
    return [torch.rand(batch_size, features_in)]


def get_init_inputs():
    return [features_in, features_out, 0.5]
