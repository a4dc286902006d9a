"""The schedule transformer: reads a task, a machine and scored schedules, writes a schedule token by token."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

from cuda_l2.families._base import Choice
from cuda_l2.propose._base import Exemplar, Space, Values
from cuda_l2.records import Task
from cuda_l2.tasks.kinds import kind_of

MAX_EXEMPLARS = 3
TASK_FEATURES = 13
TARGET_FEATURES = 5


WIDTH, LAYERS, HEADS = 64, 2, 4
"""Size of the network: small enough that proposing costs a few milliseconds a candidate."""


class Vocabulary:
    """One token for each value of each choice."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = tuple(choices)
        sizes = [len(choice.values) for choice in choices]
        self.offsets: list[int] = [0, *itertools.accumulate(sizes)]
        self.size = self.offsets[-1]
        self._masks: dict[tuple[int, Values], torch.Tensor] = {}
        self._tokens = [
            {value: self.offsets[i] + j for j, value in enumerate(choice.values)} for i, choice in enumerate(choices)
        ]

    def token(self, position: int, value: int) -> int:
        return self._tokens[position][value]

    def value(self, position: int, token: int) -> int:
        return self.choices[position].values[token - self.offsets[position]]

    def mask(self, position: int, values: Values) -> torch.Tensor:
        """True at the tokens of these values. Shared: not to be written to."""
        if (position, values) not in self._masks:
            mask = torch.zeros(self.size, dtype=torch.bool)
            mask[[self.token(position, value) for value in values]] = True
            self._masks[position, values] = mask
        return self._masks[position, values]


class ScheduleTransformer(nn.Module):
    """A causal transformer over: task, target, exemplars (score, then its tokens), start, then the answer's tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        width, length = WIDTH, len(vocabulary.choices)
        self.vocabulary = vocabulary
        self.tokens = nn.Embedding(vocabulary.size, width)
        self.task = nn.Linear(TASK_FEATURES, width)
        self.target = nn.Linear(TARGET_FEATURES, width)
        self.score = nn.Linear(1, width)
        self.start = nn.Parameter(torch.zeros(width))
        self.positions = nn.Embedding(3 + MAX_EXEMPLARS * (length + 1) + length, width)
        block = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary.size)
        nn.init.zeros_(self.head.weight)  # uniform over valid values until it has learnt
        nn.init.zeros_(self.head.bias)

    def context(self, space: Space, exemplars: Sequence[Exemplar]) -> torch.Tensor:
        """The prompt as vectors, P x width."""
        target_features = torch.tensor(space.target.features)
        parts = [self.task(task_features(space.task))[None], self.target(target_features)[None]]
        for exemplar in exemplars[:MAX_EXEMPLARS]:
            tokens = [self.vocabulary.token(i, value) for i, value in enumerate(exemplar.values)]
            parts.append(self.score(torch.tensor([exemplar.score]))[None])
            parts.append(self.tokens(torch.tensor(tokens)))
        parts.append(self.start[None])
        return torch.cat(parts)

    def logits(self, context_P: torch.Tensor, answer_GT: torch.Tensor) -> torch.Tensor:
        """Logits of the next token after each of the T answer tokens and before the first, G x (T + 1) x V."""
        group, written = answer_GT.shape
        prompt = len(context_P)
        x = torch.cat([context_P.expand(group, -1, -1), self.tokens(answer_GT)], dim=1)
        # answers always take the last positions, whatever the number of exemplars
        last = self.positions.num_embeddings - len(self.vocabulary.choices)
        positions = torch.cat([torch.arange(prompt), torch.arange(last, last + written)])
        x = x + self.positions(positions)
        mask = nn.Transformer.generate_square_subsequent_mask(prompt + written)
        result: torch.Tensor = self.head(self.blocks(x, mask=mask, is_causal=True)[:, prompt - 1 :])
        return result


def log_probabilities(
    network: ScheduleTransformer, context_P: torch.Tensor, answer_GT: torch.Tensor, masks_GTV: torch.Tensor
) -> torch.Tensor:
    """Log-probability of each written token among its valid ones, G x T."""
    logits = network.logits(context_P, answer_GT[:, :-1]).masked_fill(~masks_GTV, -torch.inf)
    return logits.log_softmax(-1).gather(-1, answer_GT[..., None]).squeeze(-1)


def task_features(task: Task) -> torch.Tensor:
    """Sizes, their logarithms and remainders, layout and accumulator or type, all of order one."""
    sizes, marks = kind_of(task).policy_features(task)
    logs = [math.log2(size) / 8 - 1 for size in sizes]
    tails = [float(size % 16 == 0) for size in sizes] + [float(size % 128 == 0) for size in sizes]
    ratio = (math.log2(sizes[0]) - math.log2(sizes[1])) / 8
    return torch.tensor([*logs, *tails, ratio, *marks])
