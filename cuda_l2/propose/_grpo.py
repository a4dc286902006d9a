"""GRPO (Shao et al., "DeepSeekMath", 2024): its loss on log-probabilities; draws and steps of the schedule policy."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cuda_l2.propose._network import Question, ScheduleNetwork

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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: four made each operator of a network this small three times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Group:
    """What was chosen in one question, with the inputs of its update."""

    question: Question
    rows_G: torch.Tensor
    log_probs_G: torch.Tensor


@torch.no_grad()
def draw_groups(
    network: ScheduleNetwork, questions: Sequence[Question], count: int, generator: torch.Generator | None
) -> list[Group]:
    """Up to `count` different candidates of each question, without replacement; the most likely without a generator."""
    groups = []
    for question, log_probs_N in zip(questions, network(questions)[0], strict=True):
        keys_N = log_probs_N
        if generator is not None:  # Gumbel's trick: the greatest of these are a draw without replacement
            keys_N = log_probs_N - torch.empty_like(log_probs_N).exponential_(generator=generator).log()
        most = min(count, int(question.open_N.sum()))
        rows_G = keys_N.argsort(descending=True, stable=True)[:most]
        groups.append(Group(question, rows_G, log_probs_N[rows_G]))
    return groups


@torch.no_grad()
def reference_of(reference: ScheduleNetwork, groups: Sequence[Group]) -> list[torch.Tensor]:
    """Log-probabilities of the groups' candidates under the reference policy, G each."""
    found = reference([group.question for group in groups])[0]
    return [log_probs_N[group.rows_G] for log_probs_N, group in zip(found, groups, strict=True)]


def group_loss(
    network: ScheduleNetwork,
    references: Sequence[torch.Tensor],
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    settings: GrpoSettings,
) -> torch.Tensor:
    """GRPO's loss, mean over groups."""
    found = network([group.question for group in groups])[0]
    losses = [
        grpo_loss(
            log_probs_N[group.rows_G, None],
            group.log_probs_G[:, None],
            reference_G[:, None],
            torch.tensor(list(advantages_G)),
            settings,
        )
        for log_probs_N, group, reference_G, advantages_G in zip(found, groups, references, advantages, strict=True)
    ]
    return torch.stack(losses).mean()


DECAYS, EPSILON = (0.9, 0.999), 1e-8


class Adam:
    """Adam (Kingma and Ba, 2015) without weight decay. torch's own loads its compiler first, which takes seconds."""

    def __init__(self, network: nn.Module, learning_rate: float) -> None:
        self._parameters, self._rate, self._steps = list(network.parameters()), learning_rate, 0
        self._moments = [[torch.zeros_like(each) for each in self._parameters] for _ in DECAYS]

    @torch.no_grad()
    def step(self) -> None:
        self._steps += 1
        first_share, second_share = (1 - decay**self._steps for decay in DECAYS)
        for parameter, first, second in zip(self._parameters, *self._moments, strict=True):
            if parameter.grad is not None:
                first.lerp_(parameter.grad, 1 - DECAYS[0])
                second.lerp_(parameter.grad.square(), 1 - DECAYS[1])
                parameter -= self._rate / first_share * first / ((second / second_share).sqrt() + EPSILON)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """KeyError, ValueError or RuntimeError where it is of another network. Takes torch's Adam's and AdamW's too."""
        if "param_groups" in state:
            each = [state["state"][number] for number in range(len(self._parameters))]
            moments = [[one[name] for one in each] for name in ("exp_avg", "exp_avg_sq")]
            state = {"steps": int(each[0]["step"]), "moments": moments}
        for kept, own in zip(state["moments"], self._moments, strict=True):
            for before, moment in zip(kept, own, strict=True):
                moment.copy_(before)
        self._steps = state["steps"]
