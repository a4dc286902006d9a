"""A KernelBench file's own Model as the baselines of CUDA candidates: eager and torch.compile, called and as graphs.

It is somebody else's Python, so it runs in sandboxed processes, one for eager and one for torch.compile, which share
nothing of the device's memory with us: what windows hold is copied there before the clock runs, the last result back
after it. The clock is the host's, from the order until the device is idle, less what the same takes without a launch;
samples are repeated in a row until that is little. What calling PyTorch costs is in the times of arms without a graph.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cuda_l2.kernelbench.arms import COMPILED, EAGER, failing, model_of
from cuda_l2.kernelbench.checkout import ForeignTask, foreign
from cuda_l2.kernelbench.opened import Call, ForeignCase
from cuda_l2.kernelbench.process import LOAD_TIMEOUT_S, Resources
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu.target import usable_cores
from cuda_l2.machine.cuda.driver import Replays
from cuda_l2.measure.baselines._base import TorchTask
from cuda_l2.measure.task_memory import CudaTaskBaselines, Played, TaskMemory
from cuda_l2.records import Task
from cuda_l2.tasks.cases import Case

LEAST_S, MOST_REPEATS = 0.004, 1 << 12
"""A sample is repeated so that the clock runs this long, and what the conversation varies by counts for little."""
EMPTY_RUNS = 9
CLOCKS = (
    "baselines: the host's clock until the device is idle, called from Python but for those in a CUDA graph;"
    " the kernel: the device's, in a CUDA graph"
)


class CudaModelBaselines(CudaTaskBaselines):
    """The reference of one file's task, whose processes start on first use.

    An arm that cannot run or be captured, or whose result is wrong, is left out with its reason.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self._known = foreign(task)
        self._processes: dict[str, ModelProcess] = {}
        self._held: list[Case] = []
        self._calls: list[Call] = []
        """Calls on the cases held, in the host's memory."""

    @property
    def all(self) -> list[TorchTask]:
        return [each for each in super().all if each.called.name in (EAGER, COMPILED)]

    @property
    def conditions(self) -> Mapping[str, Any]:
        spent = {name: process.conversation_s * 1e6 for name, process in self._processes.items()}
        return {"clocks": CLOCKS, "conversation_us": spent}

    def play(self, baseline: TorchTask, memory: TaskMemory, windows: Sequence[int]) -> Played:
        kind = baseline.called.name
        return ModelPlayed(memory, windows, lambda: self._at(kind, memory), graph=baseline.graph_of is not None)

    def _at(self, kind: str, memory: TaskMemory) -> "ModelProcess":
        """The process of an arm, with what the memory's windows hold now."""
        cases = memory.current
        if cases is not self._held:
            self._held, self._calls = cases, [_on_host(case) for case in cases]
        if kind in self._processes and self._processes[kind].calls_at_most < len(cases):
            self._end(kind)
        if kind not in self._processes:
            device, compiled = memory.stream.device.type, kind == COMPILED
            process = ModelProcess(self._known, memory.task, len(cases), device, compiled=compiled)
            try:
                process.open(cases[0])
            except BaseException:
                process.close()
                raise
            self._processes[kind] = process
        self._processes[kind].hold(self._calls)
        return self._processes[kind]

    def _try(self, baseline: TorchTask, memory: TaskMemory) -> str:
        played = self.play(baseline, memory, [0])
        try:
            played.once()
            reason = memory.violation(0, played.results)
        except Fault as fault:
            reason = fault.reason
        finally:
            played.destroy()
        if reason:
            self._end(baseline.called.name)  # where a capture failed nothing else may work
        return reason

    def _end(self, kind: str) -> None:
        if kind in self._processes:
            self._processes.pop(kind).close()

    def close(self) -> None:
        for kind in list(self._processes):
            self._end(kind)


class ModelProcess:
    """A Model in a process of its own. calls_at_most: cases that it can hold at once."""

    def __init__(self, known: ForeignTask, task: Task, calls_at_most: int, device: str, *, compiled: bool) -> None:
        self.calls_at_most, self.conversation_s = calls_at_most, 0.0
        self._calls: list[Call] | None = None
        memory_bytes = known.file.effort.memory_bytes
        limits = Resources(device, usable_cores(), memory_bytes, 0, LOAD_TIMEOUT_S)  # a call may compile
        self._module = model_of(known, task, calls_at_most, limits, compiled=compiled)

    def open(self, case: Case) -> None:
        """Load the file; Fault where that fails."""
        assert isinstance(case, ForeignCase)
        self._module.load()
        self._module.make(0, case.initial)

    def hold(self, calls: list[Call]) -> None:
        """Work on these from now on."""
        if calls is self._calls:
            return
        self._module.prepare(calls, {}, static=True)
        if self._calls is None:
            self._module.play([], graph=False)
            self.conversation_s = statistics.median(self._module.run().run_s for _ in range(EMPTY_RUNS))
        self._calls = calls

    def seconds(self, sequence: Sequence[int], *, graph: bool, warm: bool) -> float:
        """Seconds of launches on these calls, one after the other. warm: the same comes before, uncounted."""
        self._module.play(sequence, graph=graph)
        repeats = 1
        if warm:
            once_s = self._run(1)
            repeats = min(MOST_REPEATS, math.ceil(LEAST_S / once_s))
        return self._run(repeats) / repeats

    def _run(self, repeats: int) -> float:
        return max(self._module.run(repeats).run_s - self.conversation_s, 1e-7)

    def results(self, index: int) -> dict[str, torch.Tensor]:
        """Results of a call that was launched last."""
        return self._module.output(index)

    def close(self) -> None:
        self._module.close()


class ModelPlayed(Played):
    """Launches of a Model on windows. opened: its process, with what the windows hold now."""

    def __init__(
        self, memory: TaskMemory, windows: Sequence[int], opened: Callable[[], ModelProcess], *, graph: bool
    ) -> None:
        super().__init__(memory.stream.cuda_stream)
        self._device, self._outputs = memory.stream.device, memory.task.outputs
        self._windows, self._opened, self._graph = windows, opened, graph

    def replay(self) -> None:
        """Launch once and wait; Fault where that fails."""
        self._opened().seconds(self._windows, graph=self._graph, warm=False)

    def time(self, warm: int = 1, between: Callable[[], None] | None = None, before: Replays | None = None) -> float:
        """The host's seconds of one replay, behind another one where any are to come before it."""
        with failing():
            return self._opened().seconds(self._windows, graph=self._graph, warm=warm > 0)

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        found = self._opened().results(self._windows[-1])
        return tuple(found[output.name].to(self._device) for output in self._outputs)


def _on_host(case: Case) -> Call:
    assert isinstance(case, ForeignCase)
    return case.call_of_its_own({name: tensor.cpu() for name, tensor in case.tensors.items()})
