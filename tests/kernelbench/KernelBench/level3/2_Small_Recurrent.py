import torch
from torch import nn


class Model(nn.Module):
    """A recurrent layer that PyTorch keeps, and what follows it."""

    def __init__(self, features, hidden):
        super().__init__()
        self.rnn, self.head = nn.GRU(features, hidden, batch_first=True), nn.Linear(hidden, hidden)

    def forward(self, x, h0):
        sequence, last = self.rnn(x, h0)
        return torch.nn.functional.gelu(self.head(sequence)), last


batch_size = 3
length = 12
features = 8
hidden = 16


def get_inputs():
    return [torch.randn(batch_size, length, features), torch.randn(1, batch_size, hidden)]


def get_init_inputs():
    return [features, hidden]
