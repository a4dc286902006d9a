"""What PyTorch itself needs for a task of our own on a GPU: eager and torch.compile, from Python and as CUDA graphs.

From Python an arm costs what calling it costs, as users pay it; in a CUDA graph of ours its kernels alone count, as
with candidates. Precision is the task's: no TF32, no sums in fp16. An arm that cannot run or be captured, or whose
results are wrong, is left out with its reason.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cuda_l2.measure.cuda_operands import CudaCaseOperands
from cuda_l2.measure.cuda_played import Calls, Captured, Function, Played
from cuda_l2.measure.task_worker import COMPILED, EAGER
from cuda_l2.records import Operation, Task
from cuda_l2.system.errors import UserError
from cuda_l2.system.plain import line_of
from cuda_l2.tasks._base import definition

REDUCED = "torch.compile reduce-overhead"
EAGER_GRAPH, COMPILED_GRAPH = "torch eager in a CUDA graph", "torch.compile in a CUDA graph"
GRAPHS = {EAGER_GRAPH: EAGER, COMPILED_GRAPH: COMPILED}
"""What is captured."""
ARMS = (COMPILED_GRAPH, EAGER_GRAPH, REDUCED, COMPILED, EAGER)
"""The usual strongest first."""
QUICK = (EAGER_GRAPH, EAGER)
"""Of these the first that works stands for all in a search: no compiler runs."""
WARM_CALLS = 3
"""Until torch.compile has compiled, and captured a graph of its own."""


class CudaTaskBaselines:
    """PyTorch for one task at a time; what it compiled is kept until another task comes."""

    names: tuple[str, ...] = ARMS
    """Every arm that there may be."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._functions: dict[str, Function] = {}
        self._left_out: dict[str, str] = {}
        self._tried: set[str] = set()

    def arms(self, task: Task, names: Sequence[str], operands: CudaCaseOperands) -> list[str]:
        """Those of the names that compute the task, in their order. Compiles on first use."""
        if task != self._task:
            if self._functions.keys() - {EAGER}:
                torch.compiler.reset()  # imports the compiler, which takes seconds
            self._task, self._functions, self._left_out, self._tried = task, {}, {}, set()
        if not set(names) <= self._tried:
            operands.refresh()
        for name in names:
            if name not in self._tried:
                reason = self._try(name, operands)
                self._tried.add(name)
                if reason:
                    self._left_out[name] = reason
        return [name for name in names if name not in self._left_out]

    def left_out(self, names: Sequence[str]) -> dict[str, str]:
        """Those of the names that were tried and do not compute the task, with reasons."""
        return {name: self._left_out[name] for name in names if name in self._left_out}

    @property
    def conditions(self) -> Mapping[str, Any]:
        """What a reader of the times needs to know."""
        return {}

    def play(self, name: str, operands: CudaCaseOperands, windows: Sequence[int]) -> Played:
        """An arm's launches on these windows."""
        kind: type[Calls] = Captured if name in GRAPHS else Calls
        given = {window: operands.arena.given(window) for window in set(windows)}
        return kind(operands.stream, self._function(name), [given[window] for window in windows])

    def _try(self, name: str, operands: CudaCaseOperands) -> str:
        """Why an arm is left out, in one line; empty where it is not."""
        assert self._task is not None
        try:
            with torch.cuda.stream(operands.stream), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler recommends TF32
                for _ in range(WARM_CALLS):
                    self._function(name)(**operands.arena.given())
            played = self.play(name, operands, [0])
            played.once()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - compilers and captures fail in many ways
            return line_of(error)
        try:
            return operands.violation(0, named(self._task, played.results))
        finally:
            played.destroy()

    def _function(self, name: str) -> Function:
        assert isinstance(self._task, Operation)
        name = GRAPHS.get(name, name)
        if name not in self._functions:
            eager = definition(self._task.name).bind(dict(self._task.sizes))
            if name == EAGER:
                self._functions[name] = eager
            elif name == COMPILED:
                self._functions[name] = torch.compile(eager, dynamic=False)
            else:
                self._functions[name] = _by_steps(torch.compile(eager, dynamic=False, mode="reduce-overhead"))
        return self._functions[name]


def require_some(task: Task, names: Sequence[str], left_out: Mapping[str, str]) -> None:
    """UserError where no baseline is left."""
    if not names:
        reason = next(iter(left_out.values()), "none was asked for")
        raise UserError(f"PyTorch cannot compute {task} on this GPU: {reason}")


def named(task: Task, results: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Results by the names of the task's outputs."""
    return {output.name: result for output, result in zip(task.outputs, results, strict=True)}


def _by_steps(compiled: Function) -> Function:
    """Each call may overwrite the results of the one before, which is what a step is to torch's own CUDA graphs."""

    def function(**tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return compiled(**tensors)

    return function
