"""The schedule network: scores candidate schedules of a task by what they are and by what was measured of the task.

The score begins as the family's own model of the time and learns what that model does not know (Silver et al.,
"Residual Policy Learning", 2018). Where a family has no model all schedules begin alike. The policy is the softmax over
the candidates.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from cuda_l2.families._base import Choice
from cuda_l2.propose._base import Space, Values
from cuda_l2.records import Task
from cuda_l2.tasks.kinds import kind_of

TASK_FEATURES, TARGET_FEATURES, MODEL_FEATURES = 13, 5, 2
WIDTH = 96
"""Size of the network: small enough that a thousand candidates take milliseconds."""
TRUST = 10.0
"""Weight of the logarithm of the modelled time in an untrained network's logits."""
LEAST_SCORE = 1e-3
"""An exemplar's score counts as no less, since its logarithm is read."""


class Encoder:
    """Writes schedules of one space's choices as vectors of `size` numbers."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        offsets = itertools.accumulate((len(choice.values) for choice in choices), initial=0)
        self._places = [
            {value: offset + i for i, value in enumerate(choice.values)}
            for choice, offset in zip(choices, offsets, strict=False)
        ]
        self._marks = sum(len(choice.values) for choice in choices)
        self.size = MODEL_FEATURES + len(choices) + TASK_FEATURES + TARGET_FEATURES + self._marks

    def __call__(self, space: Space, schedules: Sequence[Values]) -> torch.Tensor:
        """Schedules as N x D: the logarithm of the modelled time, the logarithms of the values, the task, the machine,
        and one mark for each value of each choice."""
        shared = [*task_features(space.task), *space.target.features]
        numbers = [[*_modelled(space, values), *map(_size, values), *shared] for values in schedules]
        places = [[known[value] for known, value in zip(self._places, values, strict=True)] for values in schedules]
        marks_NM = torch.zeros(len(schedules), self._marks).scatter_(1, torch.tensor(places), 1.0)
        return torch.cat([torch.tensor(numbers), marks_NM], 1)


@dataclass(frozen=True)
class Question:
    """Candidates of one task as vectors, those that may be chosen, and measured ones with their scores."""

    inputs_ND: torch.Tensor
    open_N: torch.Tensor
    exemplars: Sequence[tuple[int, float]] = ()  # row and score


class ScheduleNetwork(nn.Module):
    """The family's model, plus a correction by a network that attends to the exemplars."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        super().__init__()
        self.encoder = Encoder(choices)
        layers = [nn.Linear(size, WIDTH) for size in (self.encoder.size, WIDTH, WIDTH)]
        self.trunk = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH + 2, WIDTH)
        self.nothing = nn.Parameter(torch.zeros(2, WIDTH))  # key and value beside those of exemplars
        self.last = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, 1)
        self.trust = nn.Parameter(torch.tensor(TRUST))
        nn.init.zeros_(self.head.weight)  # the family's model alone until it has learnt
        nn.init.zeros_(self.head.bias)

    def forward(self, questions: Sequence[Question]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the candidates, B x N, and how fast each is taken to be, as a logarithm less a constant.

        N is the most candidates of a question. What may not be chosen has a log-probability of minus infinity.
        """
        inputs_BND = nn.utils.rnn.pad_sequence([_relative(each.inputs_ND) for each in questions], batch_first=True)
        open_BN = nn.utils.rnn.pad_sequence([each.open_N for each in questions], batch_first=True)
        hidden_BNW = self.trunk(inputs_BND)
        keys, values, absent = self._exemplars(questions, hidden_BNW)
        attention_BNE = self.query(hidden_BNW) @ keys.transpose(1, 2) / math.sqrt(WIDTH)
        attention_BNE = attention_BNE.masked_fill(absent[:, None], -torch.inf).softmax(2)
        correction_BN = self.head(self.last(torch.cat([hidden_BNW, attention_BNE @ values], 2))).squeeze(2)
        logits_BN = correction_BN - self.trust * inputs_BND[..., 0]
        return logits_BN.masked_fill(~open_BN, -torch.inf).log_softmax(1), logits_BN / TRUST

    def _exemplars(
        self, questions: Sequence[Question], hidden_BNW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values, and which are absent, of nothing and then of every exemplar, B x (1 + E)."""
        most = max(len(question.exemplars) for question in questions)
        absent = torch.ones(len(questions), 1 + most, dtype=torch.bool)
        rows = torch.zeros(len(questions), most, dtype=torch.long)
        scores = torch.zeros(len(questions), most, 2)
        for i, question in enumerate(questions):
            count = len(question.exemplars)
            absent[i, : 1 + count] = False
            if count:
                rows[i, :count] = torch.tensor([row for row, _ in question.exemplars])
                logs = torch.tensor([math.log(max(score, LEAST_SCORE)) for _, score in question.exemplars])
                scores[i, :count] = torch.stack([logs, logs - logs.max()], 1)
        shown = hidden_BNW.gather(1, rows[..., None].expand(-1, -1, WIDTH))
        key, value = (part.expand(len(questions), 1, -1) for part in self.nothing[:, None])
        shown_values = self.value(torch.cat([shown, scores], 2))
        return torch.cat([key, self.key(shown)], 1), torch.cat([value, shown_values], 1), absent


def _relative(inputs_ND: torch.Tensor) -> torch.Tensor:
    """The modelled times over the least of them."""
    return torch.cat([inputs_ND[:, :1] - inputs_ND[:, :1].min(), inputs_ND[:, 1:]], 1)


def _modelled(space: Space, values: Values) -> tuple[float, float]:
    """The logarithm of the family's modelled microseconds, and whether there is a model."""
    estimate = space.estimate_us(values)
    return (math.log(estimate), 1.0) if 0 < estimate < math.inf else (0.0, 0.0)


def _size(value: int) -> float:
    return math.log2(value + 1) / 4 if value > 0 else 0.0


def task_features(task: Task) -> list[float]:
    """Sizes, their logarithms and remainders, layout and accumulator or type, all of order one."""
    sizes, marks = kind_of(task).policy_features(task)
    logs = [math.log2(size) / 8 - 1 for size in sizes]
    tails = [float(size % 16 == 0) for size in sizes] + [float(size % 128 == 0) for size in sizes]
    ratio = (math.log2(sizes[0]) - math.log2(sizes[1])) / 8
    return [*logs, *tails, ratio, *marks]
