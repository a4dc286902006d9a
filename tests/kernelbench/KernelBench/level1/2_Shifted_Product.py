import torch
from torch import nn


class Model(nn.Module):
    """(a + shift) b: a number among the inputs."""

    def forward(self, a: torch.Tensor, b: torch.Tensor, shift: float):
        return torch.matmul(a + shift, b)


M = 96
N = 80
K = M // 2


def get_inputs():
    return [torch.rand(M, K), torch.rand(K, N), 0.5]


def get_init_inputs():
    return []
