"""The memory that timed launches on a GPU work on: how baselines launch there, and whether launches gave their results.

Windows are sets of tensors. A launch's inputs lie in one window, B of a product in that one or another, and its outputs
likewise: its place says in which. A graph of launches comes in two variants that share no place, and follows the other
one, so that no result of an earlier launch is right where a later one should have written, whichever launch was left
out. All references are computed here, in the trusted process, from private copies. There is one kind of memory for
matrix products, whose windows overlap in one buffer, and one for other tasks, whose windows hold cases of their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cuda_l2 import contract
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda.arena import CudaArena
from cuda_l2.machine.cuda.buffers import Place
from cuda_l2.machine.cuda.driver import Replays
from cuda_l2.machine.cuda.helpers import Helpers
from cuda_l2.machine.cuda.segments import Segments
from cuda_l2.machine.cuda.windows import MAX_RECORDS, MOST_PAIRINGS
from cuda_l2.measure.rounds import Kernel
from cuda_l2.records import Layout, Task

VARIANTS = 2
Outputs = Mapping[str, torch.Tensor]
"""A launch's, by name."""
Launches = tuple[Replays, Sequence[int]]
"""A baseline's, with their places."""
Record = Callable[[int, int], list[int]]
"""Launches a kernel as in a timed round and keeps outputs: bytes of one, how many; the places of those kept."""


class TimedMemory(ABC):
    """The tensors in an arena's windows, with private copies where candidates cannot reach."""

    layout: Layout | None = None
    """In which the task has B, if it has one."""
    draws_power = False
    """Whether launches take as much power as the heater's products, which then run while results are checked."""
    audited = MAX_RECORDS
    """At most this many launches of a round are kept, each looked at by itself."""
    tuned = True
    """Whether the baselines have chosen their algorithms."""

    def __init__(self, arena: CudaArena, task: Task, helpers: Helpers) -> None:
        self.arena, self.task, self._segments = arena, task, Segments(helpers)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        """Where the baselines run."""
        self._played: dict[tuple[str, int, int], tuple[Any, list[int]]] = {}
        """The baselines' launches by name, number and variant, with their places: the same for every candidate."""

    def tune(self) -> None:  # noqa: B027 - not all have algorithms to choose from
        """Let the baselines choose their algorithms, once."""

    @abstractmethod
    def available(self) -> list[Any]:
        """The baselines that may compute the task here, in their rank."""

    def arms(self, wanted: Sequence[Any]) -> list[Any]:
        """Those of these baselines that compute the task."""
        return list(wanted)

    @property
    def conditions(self) -> dict[str, Any]:
        """Fields of a timing's conditions that a reader of the baselines' times needs."""
        return {}

    def begin(self, *, both_layouts: bool) -> None:
        """Lay the memory out for a measurement. both_layouts: B is read in both."""
        self.arena.select(self.task)

    def plan(self, kernel: Kernel, sms: int) -> Plan:
        return contract.plan_cuda(kernel.candidate.source, self.task, sms)

    def places(self, plan: Plan, kernel: Kernel, slot: int) -> list[dict[str, Place]]:
        """Where a kernel's tensors lie, by place."""
        return self.arena.places(plan, slot)

    @property
    def distinct(self) -> bool:
        """Whether there are windows enough for variants that share no place."""
        return self.arena.pairings == MOST_PAIRINGS

    def inputs_of(self, place: int) -> int:
        """The window of a place's first input, and of the others but B of a product whose windows overlap."""
        return place % self.arena.windows

    def outputs_of(self, place: int) -> int:
        """The window of a place's outputs."""
        several = self.arena.windows
        return (place + place // several) % several

    @abstractmethod
    def refresh(self) -> None:
        """Other inputs in every window."""

    @abstractmethod
    def require_untouched(self) -> None:
        """WrongOutput where what baselines and kernels read is not what it was."""

    def sequence(self, count: int, rng: np.random.Generator, variant: int) -> list[int]:
        """Places of successive launches.

        Inputs come in turn where none that comes again is to be cached, else at random. Each output is written from
        other inputs than the last time, and not again at once: no launch knows that its result will not be read.
        """
        several = self.arena.windows
        most = self.arena.pairings
        pairings = range(most // VARIANTS * variant, most)[: max(1, most // VARIANTS)]
        if not self.distinct:
            pairings = range(min(VARIANTS, most))
        if self.arena.sharing.rotates:
            return [pairings[i // several % len(pairings)] * several + i % several for i in range(count)]
        found, written = list[int](), list[int]()
        last: dict[int, int] = {}
        for which, pairing in rng.random((count, 2)).tolist():  # drawn at once: a call takes as long as a launch
            recent = written[-(several // 2) :] if several > 1 else []
            free = [window for window in range(several) if window not in recent]
            window = free[int(which * len(free))]
            turn = (last[window] + 1) % len(pairings) if window in last else int(pairing * len(pairings))
            last[window] = turn
            written.append(window)
            found.append(pairings[turn] * several + (window - pairings[turn]) % several)
        return found

    def played(
        self, baseline: Any, count: int, rng: np.random.Generator, variant: int = 0
    ) -> tuple[Replays, list[int]]:
        """A baseline's launches and their places; made on first use."""
        key = (baseline.name, count, variant)
        if key not in self._played:
            places = self.sequence(count, rng, variant)
            self._played[key] = (self.play(baseline, places), places)
        return self._played[key]

    @abstractmethod
    def play(self, baseline: Any, places: Sequence[int]) -> Replays:
        """A baseline's launches on these places."""

    def poison_outputs(self) -> None:
        """Fill the kernels' outputs in every window with what nothing computes."""
        self._segments.fill(self.arena.poisons())

    def poison_baselines(self) -> None:  # noqa: B027 - some return new tensors
        """The same for the baselines' outputs."""

    def poisoning(self, place: int) -> Callable[[], None]:
        """Enqueues poison for the baselines' outputs of one place."""
        return lambda: None

    @abstractmethod
    def check(
        self, outputs: Sequence[Outputs], places: Sequence[int], *, element_wise: bool, layout: Layout | None = None
    ) -> float:
        """WrongOutput where inputs at these places did not give these; the last one's largest error, or NaN.

        layout: in which B was read, if not the task's.
        """

    def check_kernel(self, places: Sequence[int], *, element_wise: bool, layout: Layout | None = None) -> float:
        """The same of what a kernel's last launches left at these places."""
        outputs = [self.arena.outputs(place) for place in places]
        return self.check(outputs, places, element_wise=element_wise, layout=layout)

    @abstractmethod
    def check_baseline(
        self, played: Launches, places: Sequence[int], *, element_wise: bool, layout: Layout | None = None
    ) -> float:
        """The same of a baseline's last replay, which left its last results at these places."""

    def audit(self, record: Record, layout: Layout | None = None) -> None:
        """WrongOutput where one of many launches of a round like the timed ones did not give its own result."""
        arena = self.arena
        self.refresh()
        arena.forget_records()
        places = record(arena.record_stride, min(self.audited, arena.records))
        outputs = [arena.recorded(number) for number in range(len(places))]
        self.check(outputs, places, element_wise=True, layout=layout)

    def close(self) -> None:
        """Give back what the baselines' launches hold."""
        for replays, _ in self._played.values():
            replays.destroy()
        self._played = {}
