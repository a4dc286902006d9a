"""GRPO's loss (Shao et al., "DeepSeekMath", 2024) on log-probabilities. The caller computes them."""

from dataclasses import dataclass

import torch

FARTHEST = 20.0
"""Most by which a log-probability counts as below the reference's: its exponential must stay a number."""


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """Step sizes of a policy update."""

    learning_rate: float = 2e-3
    clip: float = 0.2  # bound of the probability ratio's distance from 1
    kl_weight: float = 0.01  # weight of the KL divergence from the reference policy
    epochs: int = 2  # gradient steps a group
    max_gradient_norm: float = 1.0


def grpo_loss(
    log_probs_GT: torch.Tensor,
    old_log_probs_GT: torch.Tensor,
    reference_log_probs_GT: torch.Tensor,
    advantages_G: torch.Tensor,
    settings: GrpoSettings,
) -> torch.Tensor:
    """The clipped policy-gradient loss plus the KL penalty, mean over tokens.

    G samples of T tokens. The KL estimate is the unbiased exp(d) - d - 1 with d = log pi_ref - log pi.
    """
    ratio = (log_probs_GT - old_log_probs_GT).exp()
    advantages = advantages_G[:, None]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - settings.clip, 1 + settings.clip) * advantages)
    difference = (reference_log_probs_GT - log_probs_GT).clamp(max=FARTHEST)
    kl = difference.exp() - difference - 1
    return (settings.kl_weight * kl - surrogate).mean()
