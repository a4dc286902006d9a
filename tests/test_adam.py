"""The policy's own Adam beside torch's."""

import pytest
import torch
from torch import nn

from cuda_l2.propose._grpo import Adam


def step(network: nn.Module, optimizer: Adam | torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    network.zero_grad()
    network(inputs).square().sum().backward()
    optimizer.step()


def networks() -> tuple[nn.Linear, nn.Linear]:
    first, second = nn.Linear(4, 3), nn.Linear(4, 3)
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize("before", [0, 3])
def test_steps_are_torchs_also_from_a_state_that_torch_kept(before: int) -> None:
    torch.manual_seed(0)
    ours, theirs = networks()
    usual = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(before):
        step(theirs, usual, torch.randn(5, 4))
    ours.load_state_dict(theirs.state_dict())
    own = Adam(ours, 1e-2)
    if before:
        own.load_state_dict(usual.state_dict())
    for _ in range(4):
        inputs = torch.randn(5, 4)
        step(ours, own, inputs)
        step(theirs, usual, inputs)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_state_of_another_network_is_an_error() -> None:
    first, _ = networks()
    with pytest.raises((KeyError, RuntimeError)):
        Adam(first, 1e-2).load_state_dict(torch.optim.AdamW(nn.Linear(7, 7).parameters()).state_dict())
