"""What every check of a task needs: launches with hygiene watched, results held against the task's own tolerance."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch

from cuda_l2.contract import ContractError
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda.sanitizer import Tool
from cuda_l2.machine.fills import POISONS
from cuda_l2.records import Build, Operation, Tensor, VerdictStatus
from cuda_l2.tasks.cases import TaskCase, TaskCases
from cuda_l2.verify._base import CheckFailed, CheckOf, Launching, checks_in

Outputs = Mapping[str, torch.Tensor]
IMPRECISE = 0.02
"""An error below this share of the largest result is one of precision."""


class TaskSession(Launching, ABC):
    """One candidate for a task, ready to be launched on cases."""

    task: Operation
    cases: TaskCases

    @abstractmethod
    def launch(self, case: TaskCase, prefill: Outputs | None = None, *, keep: bool = False) -> Outputs:
        """The outputs of one launch; CheckFailed where it touched what it must not or left elements unwritten.

        prefill: what outputs hold before the launch, poison if not given. keep: leave the workspace as the last launch
        left it, where otherwise it holds garbage. ContractError where the case has sizes that the contract refuses.
        """

    @abstractmethod
    def require_served(self, task: Operation) -> None:
        """ContractError where the contract does not take these sizes."""

    def serves(self, task: Operation) -> bool:
        """Whether the contract takes these sizes."""
        try:
            self.require_served(task)
        except ContractError:
            return False
        return True


class GpuTaskSession(TaskSession):
    """A CUDA candidate: what goes on around a launch can be arranged too."""

    build: Build
    programmatic: bool
    """Whether a launch may begin before the kernel ahead of it has ended."""

    @abstractmethod
    def launch_behind_producer(self, old: TaskCase, case: TaskCase) -> Outputs:
        """The outputs for `case`, one of whose inputs holds `old`'s until a slow kernel before writes it.

        That kernel lets the candidate begin at once.
        """

    @abstractmethod
    def launch_beside_load(self, case: TaskCase, count: int) -> Outputs:
        """The outputs after several launches while another stream holds half of the multiprocessors for a while."""

    @abstractmethod
    def launch_stressed(self, case: TaskCase, seeds: Sequence[int], count: int) -> Iterator[Outputs]:
        """The outputs of each of so many launches of builds with delays, one build a seed, beside load."""

    @abstractmethod
    def plan_for(self, task: Operation) -> Plan:
        """What would be launched for other sizes; ContractError where the contract refuses them."""

    @abstractmethod
    def sanitizes(self) -> bool:
        """Whether compute-sanitizer works on this machine; UserError where it is not installed."""

    @abstractmethod
    def sanitize(self, tool: Tool, case: TaskCase) -> str:
        """What one of its tools finds in launches on a case, in one line; empty where nothing."""


class TaskCheck(CheckOf[TaskSession]):
    """Of tasks other than matrix products."""


def task_checks() -> list[TaskCheck]:
    """Every check in this folder, in order."""
    checks: list[TaskCheck] = checks_in(__package__ or "")
    return checks


def require_right(case: TaskCase, found: Outputs, where: str) -> None:
    """CheckFailed where a result is not within the task's tolerance; where: on which inputs, for the reason."""
    for output, limit in zip(case.task.outputs, case.bounds, strict=True):
        result = found[output.name]
        violation = limit.violation(result)
        if violation:
            status = VerdictStatus.INCORRECT
            if result.dtype.is_floating_point and bool(result.isfinite().all()) and limit.exact.isfinite().all():
                error, largest = (result.double() - limit.exact).abs().max(), limit.exact.abs().max()
                if error <= IMPRECISE * largest:
                    status = VerdictStatus.IMPRECISE
            raise CheckFailed(status, f"{output.name} {violation} ({where})")


def require_same(found: Outputs, right: Outputs, reason: str) -> None:
    """CheckFailed where a result has other bits than the right one."""
    for name, tensor in right.items():
        differ = _bits(found[name]) != _bits(tensor)
        if differ.any():
            element = int(differ.nonzero()[0, 0])
            index = [int(i) for i in torch.unravel_index(torch.tensor(element), tensor.shape)]
            raise CheckFailed(VerdictStatus.UNHYGIENIC, f"{reason}: {name}{index}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as rows of bytes."""
    return tensor.contiguous().flatten().view(torch.uint8).reshape(tensor.numel(), -1)


def require_written(output: Tensor, found: torch.Tensor) -> None:
    """CheckFailed where an output still holds its poison. Of one byte that may be right: other checks see those."""
    poison = POISONS[output.dtype]
    if len(poison) == 1 or not found.numel():
        return
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[len(poison)]
    unwritten = found.flatten().view(words) == int.from_bytes(poison, "little")
    if unwritten.any():
        index = [int(i) for i in torch.unravel_index(unwritten.nonzero()[0, 0].cpu(), found.shape)]
        count = f"{int(unwritten.sum())} of {found.numel()}"
        reason = f"left {count} elements of {output.name} unwritten, the first at {index}"
        raise CheckFailed(VerdictStatus.INCORRECT, reason)
