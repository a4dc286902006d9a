"""PyTorch on one task other than a matrix product on a GPU: what it compiled, and its launches on windows.

From Python a baseline costs what calling it costs, as users pay it; in a CUDA graph of ours its kernels alone count, as
with candidates. Precision is the task's: no TF32, no sums in fp16. One that cannot run or be captured, or whose results
are wrong, is left out with its reason.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cuda_l2.measure.baselines._base import TorchTask, baselines_of
from cuda_l2.measure.cuda_operands import CudaCaseOperands
from cuda_l2.measure.cuda_played import Calls, Captured, Function, Played
from cuda_l2.records import Operation, Task
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import line_of

WARM_CALLS = 3
"""Until torch.compile has compiled, and captured a graph of its own."""


class CudaTaskBaselines:
    """PyTorch for one task at a time; what it compiled is kept until another task comes."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._functions: dict[TorchTask, Function] = {}
        self._left_out: dict[str, str] = {}
        self._tried: set[str] = set()

    @property
    def all(self) -> list[TorchTask]:
        """Every baseline that there may be, the usual strongest first."""
        return baselines_of(TorchTask, "cuda")

    def arms(self, task: Task, wanted: Sequence[TorchTask], operands: CudaCaseOperands) -> list[TorchTask]:
        """Those that compute the task, in their order. Compiles on first use."""
        if task != self._task:
            if any(baseline.compiled for baseline in self._functions):
                torch.compiler.reset()  # imports the compiler, which takes seconds
            self._task, self._functions, self._left_out, self._tried = task, {}, {}, set()
        if not {baseline.name for baseline in wanted} <= self._tried:
            operands.refresh()
        for baseline in wanted:
            if baseline.name not in self._tried:
                reason = self._try(baseline, operands)
                self._tried.add(baseline.name)
                if reason:
                    self._left_out[baseline.name] = reason
        return [baseline for baseline in wanted if baseline.name not in self._left_out]

    def left_out(self, wanted: Sequence[TorchTask]) -> dict[str, str]:
        """The names of those that were tried and do not compute the task, with reasons."""
        return {each.name: self._left_out[each.name] for each in wanted if each.name in self._left_out}

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Fields of a timing's conditions that a reader of the times needs."""
        return {}

    def play(self, baseline: TorchTask, operands: CudaCaseOperands, windows: Sequence[int]) -> Played:
        """A baseline's launches on these windows."""
        kind: type[Calls] = Captured if baseline.graph_of else Calls
        given = {window: operands.arena.given(window) for window in set(windows)}
        return kind(operands.stream, self._function(baseline), [given[window] for window in windows])

    def _try(self, baseline: TorchTask, operands: CudaCaseOperands) -> str:
        """Why a baseline is left out, in one line; empty where it is not."""
        assert self._task is not None
        try:
            with torch.cuda.stream(operands.stream), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler recommends TF32
                for _ in range(WARM_CALLS):
                    self._function(baseline)(**operands.arena.given())
            played = self.play(baseline, operands, [0])
            played.once()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - compilers and captures fail in many ways
            return line_of(error)
        try:
            return operands.violation(0, results_by_name(self._task, played.results))
        finally:
            played.destroy()

    def _function(self, baseline: TorchTask) -> Function:
        assert isinstance(self._task, Operation)
        if baseline.called not in self._functions:
            self._functions[baseline.called] = baseline.bind(self._task)
        return self._functions[baseline.called]


class CudaFileBaselines(CudaTaskBaselines, Closing):
    """The Model of a file as baselines of its task; it holds processes until it is closed."""


def require_some(task: Task, baselines: Sequence[TorchTask], left_out: Mapping[str, str]) -> None:
    """UserError where no baseline is left."""
    if not baselines:
        reason = next(iter(left_out.values()), "none was asked for")
        raise UserError(f"PyTorch cannot compute {task} on this GPU: {reason}")


def results_by_name(task: Task, results: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Results by the names of the task's outputs."""
    return {output.name: result for output, result in zip(task.outputs, results, strict=True)}
