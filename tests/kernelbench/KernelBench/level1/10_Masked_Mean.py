import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, mask):
        return (x * mask).sum(-1) / mask.sum(-1).clamp(min=1)


batch_size = 32
length = 100


def get_inputs():
    return [torch.rand(batch_size, length), torch.randint(0, 2, (batch_size, length)).bool()]


def get_init_inputs():
    return []
