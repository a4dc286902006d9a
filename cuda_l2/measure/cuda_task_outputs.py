"""What timed launches of a task on the GPU read and write: other cases in the windows every round, outputs compared."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from cuda_l2.machine.cuda.helpers import Helpers
from cuda_l2.machine.cuda.segments import Segments
from cuda_l2.machine.cuda.task_arena import CudaTaskArena
from cuda_l2.measure.cuda_played import Played
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.task_outputs import require_own_result, why_not
from cuda_l2.tasks.cases import TaskCase, TaskCases

SPARE = 2
"""Cases beside those that lie in windows, so that a round brings others."""


class CudaTaskOperands:
    """The cases that lie in the arena's windows, with private copies where candidates cannot reach."""

    def __init__(self, arena: CudaTaskArena, cases: TaskCases, rng: np.random.Generator, helpers: Helpers) -> None:
        self.arena, self.cases, self._rng = arena, cases, rng
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        """Where the baselines run."""
        self.played: dict[tuple[str, int], tuple[Played, list[int]]] = {}
        """The baselines' launches by name and number, with their windows: the same for every candidate."""
        self._segments = Segments(helpers)
        self._pool: list[TaskCase] = []
        self.current: list[TaskCase] = []
        """What the windows hold, another list after every change."""

    def refresh(self) -> None:
        """Cases in every window, drawn from a few more."""
        while len(self._pool) < self.arena.windows + SPARE:
            self._pool.append(self.cases.timed(len(self._pool)))
        chosen = self._rng.permutation(len(self._pool))[: self.arena.windows]
        self.current = [self._pool[int(index)] for index in chosen]
        self._segments.fill(
            [segment for window, case in enumerate(self.current) for segment in self.arena.held(case.tensors, window)]
        )

    def poison_outputs(self) -> None:
        self._segments.fill(self.arena.poisons())

    def violation(self, window: int, found: Mapping[str, torch.Tensor]) -> str:
        """Why these are not the outputs of a window's case; empty where they are."""
        return why_not(self.cases, self.current[window], found)

    def check(
        self, outputs: Sequence[Mapping[str, torch.Tensor]], windows: Sequence[int], *, element_wise: bool
    ) -> float:
        """WrongOutput where launches on these windows did not give these; the last one's largest error or NaN."""
        for found, window in zip(outputs, windows, strict=True):
            require_own_result(self.cases, self.current[window], found)
        return self.current[windows[-1]].largest_error(outputs[-1]) if element_wise else float("nan")

    def require_untouched(self) -> None:
        """WrongOutput where a launch changed inputs or weights."""
        for window, case in enumerate(self.current):
            if not all(self._segments.hold(self.arena.held(case.tensors, window))):
                raise WrongOutput("changed its inputs or weights in a timed round")

    def close(self) -> None:
        """Give back what the baselines' launches hold."""
        for replays, _ in self.played.values():
            replays.destroy()
        self.played = {}
