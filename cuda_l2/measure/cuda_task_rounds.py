"""Times CUDA candidates for tasks other than matrix products against PyTorch."""

from collections.abc import Callable, Sequence
from functools import partial

from cuda_l2 import contract
from cuda_l2.machine.cuda.driver import Replays
from cuda_l2.machine.cuda.worker import slowest_s
from cuda_l2.measure.cuda_operands import CudaCaseOperands
from cuda_l2.measure.cuda_played import Played
from cuda_l2.measure.cuda_task_baselines import CudaTaskBaselines, named
from cuda_l2.measure.graph_rounds import Gpu, GraphRounds, Output, measured
from cuda_l2.measure.rounds import CANDIDATE, Terms
from cuda_l2.records import Build, Candidate, Timing

AUDITED = 64
"""At most so many launches of a round are looked at, each by itself."""


def measure_cuda_task(
    gpu: Gpu,
    baselines: CudaTaskBaselines,
    names: Sequence[str],
    kernel: tuple[Candidate, Build] | None,
    operands: CudaCaseOperands,
    terms: Terms,
) -> Timing:
    """Time a kernel that was found correct against the named baselines, or without one those against their first."""
    rounds = partial(CudaTaskRounds, gpu, baselines, names, kernel, operands, terms)
    (timing,) = measured(gpu, rounds, [CANDIDATE] if kernel else names[:1], terms.protocol).values()
    return timing


class CudaTaskRounds(GraphRounds):
    draws_power = False  # most tasks move data

    def __init__(
        self,
        gpu: Gpu,
        baselines: CudaTaskBaselines,
        names: Sequence[str],
        kernel: tuple[Candidate, Build] | None,
        operands: CudaCaseOperands,
        terms: Terms,
    ) -> None:
        self.operands, self.arena, self.baselines = operands, operands.arena, baselines
        self._last_played: dict[str, Played] = {}
        """What each baseline did last."""
        task, kernels = operands.cases.task, [CANDIDATE] if kernel else []
        self.arena.select(task)
        subject = CANDIDATE if kernel else names[0]
        super().__init__(gpu, operands, [*names, *kernels], terms, subject=subject, kernels=kernels)
        if kernel:
            candidate, build = kernel
            plan = contract.plan_cuda(candidate.source, task, gpu.sms)
            self.load(CANDIDATE, build, plan, [self.arena.places(plan, w) for w in range(self.arena.windows)])
        self.trace()

    @property
    def slowest_launch_s(self) -> float:
        return slowest_s(self.arena.task)

    @property
    def rotates(self) -> bool:
        return self.protocol.rotates

    def windows(self, count: int) -> list[int]:
        """At random, never the same twice running, nor from one replay to the next; each in its turn where they rotate.

        So none of several launches finds its own result in outputs that windows share, and none that rotates finds its
        tensors in the cache.
        """
        several = self.arena.windows
        if self.rotates or several == 1:
            return [i % several for i in range(count)]
        found = [int(self.rng.integers(several))]
        for _ in range(count - 1):
            found.append((found[-1] + int(self.rng.integers(1, several))) % several)
        if count > 1 and found[-1] == found[0]:
            others = set(range(several)) - {found[0], found[-2]}
            found[-1] = min(others, default=found[-1])
        return found

    def written(self, window: int) -> list[Output]:
        return self.arena.written(window)

    def played(self, name: str, count: int) -> tuple[Replays, list[int]]:
        known = self.operands.played
        if (name, count) not in known:
            windows = self.windows(count)
            known[name, count] = (self.baselines.play(name, self.operands, windows), windows)
        played, windows = known[name, count]
        self._last_played[name] = played
        return played, windows

    def poison(self, name: str) -> None:
        """A kernel's alone: PyTorch's results are new tensors, or lie where its graphs have them."""
        if name in self.slots:
            self.operands.poison_outputs()
            self.arena.fill_workspaces(self._plans[name], persistent=False, slot=self.slots[name])

    def poison_between(self, name: str, window: int) -> Callable[[], None]:
        return lambda: None

    def check(self, name: str, windows: Sequence[int], element_wise: bool) -> float:
        if name in self.slots:
            found = [self.arena.outputs(window) for window in windows]
            return self.operands.check(found, windows, element_wise=element_wise)
        results = named(self.arena.task, self._last_played[name].results)
        return self.operands.check([results], windows[-1:], element_wise=element_wise)

    def audit(self, name: str) -> None:
        arena = self.arena
        self.operands.refresh()
        arena.forget_records()
        windows = self.record(name, arena.written, arena.record_stride, min(AUDITED, arena.records))
        found = [arena.recorded(number) for number in range(len(windows))]
        self.operands.check(found, windows, element_wise=True)
