"""What every check of a task needs: launches with hygiene watched, results held against the task's own tolerance."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

import torch

from cuda_l2.contract import ContractError, CpuContract
from cuda_l2.records import Operation, VerdictStatus
from cuda_l2.tasks.cases import TaskCase, TaskCases
from cuda_l2.verify._base import CheckFailed, checks_in

Outputs = Mapping[str, torch.Tensor]
IMPRECISE = 0.02
"""An error below this share of the largest result is one of precision."""


class TaskSession(ABC):
    """One candidate in its process, ready to be launched on cases. A context manager."""

    task: Operation
    contract: CpuContract
    cases: TaskCases
    judges_special = False
    """Whether NaN and infinities among the inputs are tried."""
    rms_error: float = float("nan")
    max_error: float = float("nan")
    baseline_deviation: float = float("nan")

    @abstractmethod
    def launch(self, case: TaskCase, prefill: Outputs | None = None, *, keep: bool = False) -> Outputs:
        """The outputs of one launch; CheckFailed where it touched what it must not or left elements unwritten.

        prefill: what outputs hold before the launch, poison if not given. keep: leave the workspace as the last launch
        left it, where otherwise it holds garbage. ContractError where the case has sizes that the contract refuses.
        """

    def serves(self, task: Operation) -> bool:
        """Whether the contract takes these sizes."""
        try:
            self.contract.task_workspace_bytes(task)
        except ContractError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class TaskCheck(ABC):
    """One property that a correct candidate for a task has."""

    name: str
    order: int
    full_only = False

    @abstractmethod
    def run(self, session: TaskSession) -> None:
        """Launch as needed; raise CheckFailed where the property does not hold."""

    def applies(self, session: TaskSession) -> bool:
        return True


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
