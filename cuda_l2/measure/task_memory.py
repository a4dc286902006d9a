"""Tasks other than matrix products on a GPU: cases in the windows, and PyTorch as what kernels are timed beside.

From Python a baseline costs what calling it costs, as users pay it; in a CUDA graph of ours its kernels alone count, as
with candidates. Precision is the task's: no TF32, no sums in fp16. One that cannot run or be captured, or whose results
are wrong, is left out with its reason. Every output that is looked at is checked by the task's tolerance.
"""

import gc
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cuda_l2.machine.cuda.arena import CudaArena
from cuda_l2.machine.cuda.driver import Replays
from cuda_l2.machine.cuda.helpers import Helpers
from cuda_l2.measure.baselines._base import Function, TorchTask, baselines_of
from cuda_l2.measure.operands import require_own_result, why_not
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.timed_memory import Launches, Outputs, TimedMemory
from cuda_l2.records import Layout, Task
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import line_of
from cuda_l2.tasks.cases import Case, Cases

SPARE = 2
"""Cases beside those that lie in windows, so that a round brings others."""
WARM_CALLS = 3
"""Until torch.compile has compiled, and captured a graph of its own."""


class Played(Replays):
    """Launches on windows, one after the other."""

    @property
    @abstractmethod
    def results(self) -> tuple[torch.Tensor, ...]:
        """The last launch's, in the order of the task's outputs."""


class Calls(Played):
    """Calls of a function from Python."""

    def __init__(
        self, stream: torch.cuda.Stream, function: Function, given: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        super().__init__(stream.cuda_stream)
        self._on, self._function, self._given = stream, function, given
        self._results: tuple[torch.Tensor, ...] = ()

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        return self._results

    def replay(self) -> None:
        with torch.cuda.stream(self._on):
            for tensors in self._given:
                self._results = ()
                self._results = self._function(**tensors)


class Captured(Calls):
    """A CUDA graph of the calls; what they allocate lies in a pool of its own."""

    def __init__(
        self, stream: torch.cuda.Stream, function: Function, given: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        super().__init__(stream, function, given)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            function(**given[0])  # what a library sets up on first use is not captured
            stream.synchronize()
            gc.collect()  # as torch does: what is freed while a stream is captured may end the capture
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for tensors in given:
                    self._results = ()
                    self._results = function(**tensors)
            finally:
                self._graph.capture_end()

    def replay(self) -> None:
        with torch.cuda.stream(self._on):
            self._graph.replay()

    def destroy(self) -> None:
        super().destroy()
        self._results = ()
        self._graph.reset()


class TaskMemory(TimedMemory):
    """Cases in the windows."""

    audited = 64

    def __init__(
        self,
        arena: CudaArena,
        cases: Cases,
        rng: np.random.Generator,
        helpers: Helpers,
        baselines: "Callable[[Task], CudaTaskBaselines]",
    ) -> None:
        """baselines: those of a task, kept for the next candidate."""
        super().__init__(arena, cases.task, helpers)
        self.cases, self._rng, self._baselines = cases, rng, baselines
        self._pool: list[Case] = []
        self.current: list[Case] = []
        """The case in each window, another list after every change."""
        self._left_out: dict[str, str] = {}

    @property
    def baselines(self) -> "CudaTaskBaselines":
        return self._baselines(self.task)

    def available(self) -> list[TorchTask]:
        return self.baselines.all

    def arms(self, wanted: Sequence[TorchTask]) -> list[TorchTask]:
        """Compiles on first use; UserError where none is left."""
        self._left_out = self.baselines.left_out(self, wanted)
        chosen = [baseline for baseline in wanted if baseline.name not in self._left_out]
        if not chosen:
            reason = next(iter(self._left_out.values()), "none was asked for")
            raise UserError(f"PyTorch cannot compute {self.task} on this GPU: {reason}")
        return chosen

    @property
    def conditions(self) -> dict[str, Any]:
        return {"left_out": self._left_out, **self.baselines.conditions}

    def refresh(self) -> None:
        """The cases are drawn from a few more."""
        while len(self._pool) < self.arena.windows + SPARE:
            self._pool.append(self.cases.timed(len(self._pool)))
        chosen = self._rng.permutation(len(self._pool))[: self.arena.windows]
        self.current = [self._pool[int(index)] for index in chosen]
        self._segments.fill(
            [segment for window, case in enumerate(self.current) for segment in self.arena.held(case.tensors, window)]
        )

    def require_untouched(self) -> None:
        for window, case in enumerate(self.current):
            if not all(self._segments.hold(self.arena.held(case.tensors, window))):
                raise WrongOutput("changed its inputs or weights in a timed round")

    def play(self, baseline: TorchTask, places: Sequence[int]) -> Played:
        return self.baselines.play(baseline, self, [self.inputs_of(place) for place in places])

    def violation(self, window: int, results: Sequence[torch.Tensor]) -> str:
        """Why a baseline's results, in the outputs' order, are not those of a window's case; empty where they are."""
        return why_not(self.cases, self.current[window], self._by_name(results))

    def check(
        self, outputs: Sequence[Outputs], places: Sequence[int], *, element_wise: bool, layout: Layout | None = None
    ) -> float:
        cases = [self.current[self.inputs_of(place)] for place in places]
        for found, case in zip(outputs, cases, strict=True):
            require_own_result(self.cases, case, found)
        return cases[-1].errors(outputs[-1])[1] if element_wise else float("nan")

    def check_baseline(
        self, played: Launches, places: Sequence[int], *, element_wise: bool, layout: Layout | None = None
    ) -> float:
        """Results are new tensors, or lie where PyTorch's graphs have them: the last launch's are left."""
        replays, sequence = played
        assert isinstance(replays, Played)
        results = [self._by_name(replays.results)]
        return self.check(results, sequence[-1:], element_wise=element_wise)

    def _by_name(self, results: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {output.name: result for output, result in zip(self.task.outputs, results, strict=True)}


class CudaTaskBaselines(Closing):
    """PyTorch for one task at a time; what it compiled is kept until another task comes."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._functions: dict[TorchTask, Function] = {}
        self._reasons: dict[str, str] = {}
        """Why a baseline that was tried is left out; empty where it is not."""

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Fields of a timing's conditions that a reader of the times needs."""
        return {}

    @property
    def all(self) -> list[TorchTask]:
        """Every baseline that there may be, the usual strongest first."""
        return baselines_of(TorchTask, "cuda")

    def left_out(self, memory: TaskMemory, wanted: Sequence[TorchTask]) -> dict[str, str]:
        """The names of those that do not compute the task, with reasons. Compiles on first use."""
        if memory.task != self._task:
            if any(baseline.compiled for baseline in self._functions):
                torch.compiler.reset()  # imports the compiler, which takes seconds
            self._task, self._functions, self._reasons = memory.task, {}, {}
        untried = [baseline for baseline in wanted if baseline.name not in self._reasons]
        if untried:
            memory.refresh()
        for baseline in untried:
            self._reasons[baseline.name] = self._try(baseline, memory)
        return {each.name: self._reasons[each.name] for each in wanted if self._reasons[each.name]}

    def play(self, baseline: TorchTask, memory: TaskMemory, windows: Sequence[int]) -> Played:
        """A baseline's launches on these windows."""
        kind: type[Calls] = Captured if baseline.graph_of else Calls
        given = {window: memory.arena.given(window) for window in set(windows)}
        return kind(memory.stream, self._function(baseline, memory.task), [given[window] for window in windows])

    def _try(self, baseline: TorchTask, memory: TaskMemory) -> str:
        """Why a baseline is left out, in one line; empty where it is not."""
        try:
            with torch.cuda.stream(memory.stream), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler recommends TF32
                for _ in range(WARM_CALLS):
                    self._function(baseline, memory.task)(**memory.arena.given())
            played = self.play(baseline, memory, [0])
            played.once()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - compilers and captures fail in many ways
            return line_of(error)
        try:
            return memory.violation(0, played.results)
        finally:
            played.destroy()

    def _function(self, baseline: TorchTask, task: Any) -> Function:
        if baseline.called not in self._functions:
            self._functions[baseline.called] = baseline.bind(task)
        return self._functions[baseline.called]

    def close(self) -> None:
        """Nothing is held beside what Python frees."""
