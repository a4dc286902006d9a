"""The memory that timed launches on a GPU work on: how baselines launch there, and whether launches gave their results.

Windows are sets of tensors that successive launches take in turn. All references are computed here, in the trusted
process, from private copies. There is one kind of memory for matrix products, whose windows overlap in one buffer, and
one for other tasks, whose windows hold cases of their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cuda_l2 import contract
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda.arena import MAX_RECORDS, CudaArena
from cuda_l2.machine.cuda.buffers import Place
from cuda_l2.machine.cuda.driver import Replays
from cuda_l2.measure.rounds import Kernel
from cuda_l2.records import Layout, Task

Outputs = Mapping[str, torch.Tensor]
"""A launch's, by name."""
Record = Callable[[int, int], list[int]]
"""Launches a kernel as in a timed round and keeps outputs: bytes of one, how many; the windows of those kept."""


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

    def __init__(self, arena: CudaArena, task: Task) -> None:
        self.arena, self.task = arena, task
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        """Where the baselines run."""
        self._played: dict[tuple[str, int], tuple[Any, list[int]]] = {}
        """The baselines' launches by name and number, with their windows: the same for every candidate."""

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
        """Where a kernel's tensors lie in every window."""
        return [self.arena.places(plan, window, slot=slot) for window in range(self.arena.windows)]

    @abstractmethod
    def refresh(self) -> None:
        """Other inputs in every window."""

    @abstractmethod
    def require_untouched(self) -> None:
        """WrongOutput where what baselines and kernels read is not what it was."""

    @property
    def rotates(self) -> bool:
        """Whether every window has outputs of its own."""
        return self.arena.sharing.rotates

    @abstractmethod
    def windows(self, count: int, rng: np.random.Generator) -> list[int]:
        """Those of successive launches; where they rotate each in its turn, so that none that comes again is cached."""

    def played(self, baseline: Any, count: int, rng: np.random.Generator) -> tuple[Replays, list[int]]:
        """A baseline's launches and their windows; made on first use."""
        key = (baseline.name, count)
        if key not in self._played:
            windows = self.windows(count, rng)
            self._played[key] = (self.play(baseline, windows), windows)
        return self._played[key]

    @abstractmethod
    def play(self, baseline: Any, windows: Sequence[int]) -> Replays:
        """A baseline's launches on these windows."""

    @abstractmethod
    def poison_outputs(self) -> None:
        """Fill the kernels' outputs in every window with what nothing computes."""

    def poison_baselines(self) -> None:  # noqa: B027 - some return new tensors
        """The same for the baselines' outputs."""

    def poisoning(self, window: int) -> Callable[[], None]:
        """Enqueues poison for the baselines' outputs in one window."""
        return lambda: None

    @abstractmethod
    def check(self, outputs: Sequence[Outputs], windows: Sequence[int], *, element_wise: bool) -> float:
        """WrongOutput where launches on these windows did not give these; the last one's largest error, or NaN."""

    def check_kernel(self, windows: Sequence[int], *, element_wise: bool) -> float:
        """The same of what a kernel's last launches left in these windows."""
        return self.check([self.arena.outputs(window) for window in windows], windows, element_wise=element_wise)

    @abstractmethod
    def check_baseline(self, name: str, count: int, windows: Sequence[int], *, element_wise: bool) -> float:
        """The same of a baseline's last replay of `count` launches."""

    def audit(self, record: Record) -> None:
        """WrongOutput where one of many launches of a round like the timed ones did not give its own result."""
        arena = self.arena
        self.refresh()
        arena.forget_records()
        windows = record(arena.record_stride, min(self.audited, arena.records))
        outputs = [arena.recorded(number) for number in range(len(windows))]
        self.check(outputs, windows, element_wise=True)

    def close(self) -> None:
        """Give back what the baselines' launches hold."""
        for replays, _ in self._played.values():
            replays.destroy()
        self._played = {}
