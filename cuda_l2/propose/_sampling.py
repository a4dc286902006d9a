"""Choices of the schedule policy among candidates, and the loss by which it learns from their rewards."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cuda_l2.propose._grpo import GrpoSettings, grpo_loss
from cuda_l2.propose._network import Question, ScheduleNetwork


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
