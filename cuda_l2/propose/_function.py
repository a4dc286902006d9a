"""A proposer made of a function that answers with text, such as a model in training."""

from collections.abc import Callable, Sequence

from cuda_l2.llm._base import Message, Messages
from cuda_l2.propose._answer import parse_answer
from cuda_l2.propose._base import Proposer
from cuda_l2.records import Candidate

Write = Callable[[int], Sequence[str]]
"""Gives a number of answers to the same question, each with one file, fenced or bare; fewer at the end."""


class FunctionProposer(Proposer):
    """Asks the function for a group of answers at a time."""

    def __init__(self, name: str, question: str, write: Write, group: int | None = None) -> None:
        self.name, self.group, self._question, self._write = name, group, question, write
        self._answers: list[str] = []
        self._fruitless = 0

    @property
    def fruitless(self) -> int:
        return self._fruitless

    def propose(self, count: int) -> list[Candidate]:
        candidates = []
        self._answers = []
        for text in self._write(count)[:count]:
            answer = parse_answer(text)
            if answer.source:
                candidates.append(Candidate(answer.source, self.name))
                self._answers.append(text)
            else:
                self._fruitless += 1
        return candidates

    def conversations(self) -> list[Messages]:
        question = Message("user", self._question)
        return [(question, Message("assistant", text)) for text in self._answers]
