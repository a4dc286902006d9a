"""A language model that picks schedules in one question: it reads the task and a list, and answers numbers.

Helion does so, and reports nearly its own search's quality with a tenth of the configurations. What the answer lacks is
drawn at random.
"""

import re
from collections.abc import Sequence

import numpy as np

from cuda_l2.llm._base import Message, Model, Outcome, Reply, Request
from cuda_l2.propose._base import ABSENT, Ordered, Space, Trials, Values
from cuda_l2.system.errors import UserError

LISTED = 128
"""Schedules in the question, at most."""
WANTED = 16
"""Schedules that the answer should name."""
ANSWER_TOKENS = 4096


class AskedProposer(Ordered):
    """Asks at its first proposal."""

    def __init__(self, space: Space, trials: Trials, rng: np.random.Generator, model: Model) -> None:
        super().__init__(space, trials, rng)
        self._model, self.name = model, model.name

    def first(self) -> Sequence[Values]:
        """UserError where the model gives no answer."""
        modelled, drawn = self._space.ranked(LISTED // 2), self._space.some(LISTED, self._rng)
        listed = list(dict.fromkeys([*modelled, *drawn]))[:LISTED]
        listed = [listed[i] for i in self._rng.permutation(len(listed))]  # no place in the list says anything
        replies: list[Reply] = []
        messages = (Message("user", question(self._space, listed)),)
        request = Request(messages, ANSWER_TOKENS, seed=int(self._rng.integers(1 << 31)))
        self._model.ask([request], lambda _, reply: replies.append(reply))
        if replies[0].outcome is not Outcome.ANSWERED:
            raise UserError(f"{self.name} gave no answer: {replies[0].reason}")
        numbers = numbers_of(replies[0].text)
        if not numbers:
            raise UserError(f"no line of {self.name}'s answer holds the numbers of schedules alone")
        return [listed[number - 1] for number in numbers if 1 <= number <= len(listed)]


def numbers_of(answer: str) -> list[int]:
    """The numbers of the last line that holds nothing else, each once."""
    lines = [line for line in answer.splitlines() if re.fullmatch(r"[\s\[(]*\d+(?:[\s,;]+\d+)*[\s\]).]*", line)]
    return list(dict.fromkeys(int(number) for number in re.findall(r"\d+", lines[-1]))) if lines else []


def question(space: Space, listed: Sequence[Values]) -> str:
    """The task, the machine, what the choices mean, and the schedules by number."""
    choices = [f"{choice.name}: {choice.help}" for choice in space.choices]
    lines = [
        f"{number}: " + " ".join(f"{c.name}={v}" for c, v in zip(space.choices, values, strict=True) if v != ABSENT)
        for number, values in enumerate(listed, 1)
    ]
    return "\n".join(
        [
            f"Which of these kernel schedules are the fastest for the task {space.task} on {space.target.machine}?",
            "Choices of a schedule:",
            *choices,
            "Schedules:",
            *lines,
            f"Answer with the numbers of the {WANTED} that you take to be the fastest, the fastest first. The last line"
            " of your answer holds these numbers alone.",
        ]
    )
