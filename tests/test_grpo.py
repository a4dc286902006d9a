"""propose/_grpo.py against values computed by hand."""

import math

import pytest
import torch

from cuda_l2.propose._grpo import GrpoSettings, grpo_loss

SETTINGS = GrpoSettings(clip=0.2, kl_weight=0.5)


def loss(new: float, old: float, reference: float, advantage: float) -> float:
    def token(p: float) -> torch.Tensor:
        return torch.tensor([[math.log(p)]])

    return float(grpo_loss(token(new), token(old), token(reference), torch.tensor([advantage]), SETTINGS))


def test_without_change_the_loss_is_minus_the_advantage() -> None:
    assert loss(0.5, 0.5, 0.5, 2.0) == pytest.approx(-2.0)


def test_the_ratio_is_clipped_where_it_would_pay() -> None:
    assert loss(0.8, 0.4, 0.8, 1.0) == pytest.approx(-1.2)  # ratio 2, clipped to 1.2
    assert loss(0.8, 0.4, 0.8, -1.0) == pytest.approx(2.0)  # a bad move is not clipped
    assert loss(0.2, 0.4, 0.2, -1.0) == pytest.approx(0.8)  # ratio 0.5, clipped to 0.8


def test_divergence_from_the_reference_costs() -> None:
    d = math.log(0.25) - math.log(0.5)
    assert loss(0.5, 0.5, 0.25, 0.0) == pytest.approx(0.5 * (math.exp(d) - d - 1))


def test_gradients_raise_good_answers_and_lower_bad_ones() -> None:
    log_probs = torch.log(torch.tensor([[0.5], [0.5]])).requires_grad_()
    old = log_probs.detach()
    grpo_loss(log_probs, old, old, torch.tensor([1.0, -1.0]), SETTINGS).backward()
    assert log_probs.grad[0] < 0 < log_probs.grad[1]  # descent on the loss


def test_a_choice_that_became_all_but_impossible_leaves_the_loss_a_number() -> None:
    far, zero = torch.tensor([[-300.0]], requires_grad=True), torch.zeros(1, 1)
    loss = grpo_loss(far, far.detach(), zero, torch.ones(1), GrpoSettings(kl_weight=0.0))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(far.grad).all()
