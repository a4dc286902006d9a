"""Groups of schedules that the network writes, and the loss by which it learns from their rewards."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cuda_l2.propose._base import Exemplar, Space, Values
from cuda_l2.propose._grpo import GrpoSettings, grpo_loss
from cuda_l2.propose._network import ScheduleTransformer, log_probabilities

NOVELTY_TRIES = 8
HEATING = 1.5
"""A known schedule is drawn again up to NOVELTY_TRIES times, each time at a temperature higher by this factor: a
repetition would earn nothing, and a policy that has converged must still explore."""
GREEDY = 1e-3
"""The temperature of a most likely answer, value by value."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: four made each operator of a network this small three times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class Group:
    """A sampled group with the inputs of its update."""

    exemplars: list[Exemplar]
    answer_GT: torch.Tensor
    masks_GTV: torch.Tensor
    log_probs_GT: torch.Tensor


def values_of(network: ScheduleTransformer, tokens_T: torch.Tensor) -> Values:
    return tuple(network.vocabulary.value(i, token) for i, token in enumerate(tokens_T.tolist()))


@torch.no_grad()
def sample_group(
    network: ScheduleTransformer,
    space: Space,
    exemplars: list[Exemplar],
    count: int,
    generator: torch.Generator,
    known: set[Values],
    greedy: bool = False,
) -> Group:
    """A group of answers, known ones drawn again a few times. greedy: the first is the most likely one."""
    context = network.context(space, exemplars)
    temperatures = torch.ones(count)
    if greedy:
        temperatures[0] = GREEDY
    answers, masks = draw_answers(network, space, context, temperatures, generator)
    for attempt in range(1, NOVELTY_TRIES + 1):
        seen = set(known)
        again = []
        for i, row in enumerate(answers):
            values = values_of(network, row)
            if values in seen:
                again.append(i)
            seen.add(values)
        if not again:
            break
        hotter = torch.full((len(again),), HEATING**attempt)
        answers[again], masks[again] = draw_answers(network, space, context, hotter, generator)
    return Group(exemplars, answers, masks, log_probabilities(network, context, answers, masks))


def draw_answers(
    network: ScheduleTransformer,
    space: Space,
    context_P: torch.Tensor,
    temperatures_G: torch.Tensor,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers, G x T, and the masks of what was valid at each place, G x T x V."""
    vocabulary = network.vocabulary
    answers = torch.empty(len(temperatures_G), 0, dtype=torch.long)
    masks: list[torch.Tensor] = []
    for position in range(len(vocabulary.choices)):
        valid = [space.valid(values_of(network, row)) for row in answers]
        mask = torch.stack([vocabulary.mask(position, values) for values in valid])
        masks.append(mask)
        if all(len(values) == 1 for values in valid):
            probabilities = mask.float()  # nothing to decide
        else:
            logits = network.logits(context_P, answers)[:, -1]
            probabilities = (logits / temperatures_G[:, None]).masked_fill(~mask, -torch.inf).softmax(-1)
        token = torch.multinomial(probabilities, 1, generator=generator)
        answers = torch.cat([answers, token], dim=1)
    return answers, torch.stack(masks, dim=1)


def tokens_of(
    network: ScheduleTransformer, space: Space, schedules: Sequence[Values]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Given schedules as answers, G x T, with the masks of what was valid, G x T x V."""
    vocabulary = network.vocabulary
    places = range(len(vocabulary.choices))
    answers = [[vocabulary.token(i, values[i]) for i in places] for values in schedules]
    masks = [torch.stack([vocabulary.mask(i, space.valid(values[:i])) for i in places]) for values in schedules]
    return torch.tensor(answers), torch.stack(masks)


def group_loss(
    network: ScheduleTransformer,
    reference_GT: torch.Tensor,
    space: Space,
    group: Group,
    advantages_G: torch.Tensor,
    settings: GrpoSettings,
) -> torch.Tensor:
    """GRPO's loss of a group. reference_GT: log-probabilities of its tokens under the reference policy."""
    context = network.context(space, group.exemplars)
    log_probs = log_probabilities(network, context, group.answer_GT, group.masks_GTV)
    return grpo_loss(log_probs, group.log_probs_GT, reference_GT, advantages_G, settings)


@torch.no_grad()
def reference_of(reference: ScheduleTransformer, space: Space, group: Group) -> torch.Tensor:
    """Log-probabilities of a group's tokens under the reference policy, G x T."""
    return log_probabilities(reference, reference.context(space, group.exemplars), group.answer_GT, group.masks_GTV)
