"""How long the optimisation of a task takes: its budget, and what is reserved for the report after it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cuda_l2.measure.protocols import Protocol

REPORT_S, REPORT_LAUNCHES = 30.0, 1500.0
"""Time for comparing the finalists and reporting the winner: a constant, which counts starts of torch too, and launches
at the roofline bound, which count references in fp64, checks and the fewest rounds (docs/log.md)."""
KERNEL_S, KERNEL_LAUNCHES = 4.0, 400.0
"""The same of a search's first kernel."""
REPORT_S_PER_BYTE, KERNEL_S_PER_BYTE = 6.5e-7, 3.5e-7
"""What a CPU takes beside, by the bytes of the task's tensors: checks draw and compare their elements one by one."""
COMPILE_S = 40.0
"""Time for torch.compile where it is among the baselines: twice, for the search's inputs and the report's."""
CHOICE, LATE_CHOICE = 0.4, 0.7
"""Share of the report's time in which the finalists are to have been compared; the second where the machine was busy
during the whole search."""

FIRST = 0.7
"""Share of what is then left that the first of several protocols gets, whose figure is read most."""


@dataclass(frozen=True, slots=True)
class Plan:
    """budget_s: preparing and searching. report_s: at most what follows, infinite where nothing limits it.

    kernel_s: about what one kernel takes.
    """

    budget_s: float
    report_s: float
    kernel_s: float

    @property
    def late(self) -> bool:
        """Whether one kernel alone takes longer than the budget."""
        return self.kernel_s > 1.1 * self.budget_s

    @property
    def most_s(self) -> float:
        return max(self.budget_s, self.kernel_s if self.late else 0.0) + self.report_s

    def __str__(self) -> str:
        limited = math.isfinite(self.report_s)
        report = f"then at most {self.report_s:.0f} s to compare and report the best"
        report = report if limited else "then a report, whose checks with sanitizers have no time limit"
        if self.late:
            long = f"checking and timing one kernel takes about {self.kernel_s:.0f} s, longer than the budget"
            return f"{long}, which does not cut it short; {report}"
        return f"{self.budget_s:g} s to prepare and search, {report}"


def plan(
    budget_s: float,
    bound_s: float,
    tensor_bytes: int,
    protocols: Iterable[Protocol],
    *,
    compiles: bool = False,
    on_cpu: bool,
) -> Plan:
    """The plan of a task.

    bound_s: its roofline bound. tensor_bytes: of all its tensors. protocols: of the report. compiles: torch.compile is
    a baseline. on_cpu: else nothing limits the report, whose sanitizers and stress builds take what they take.
    """
    fixed_s = sum(protocol.warmup_s + protocol.measure_s for protocol in protocols)
    extra_s = COMPILE_S / 2 if compiles else 0.0
    checked = tensor_bytes if on_cpu else 0
    report_s = REPORT_S + REPORT_LAUNCHES * bound_s + REPORT_S_PER_BYTE * checked + fixed_s + extra_s
    kernel_s = KERNEL_S + KERNEL_LAUNCHES * bound_s + KERNEL_S_PER_BYTE * checked + extra_s
    return Plan(budget_s, 5.0 * math.ceil(report_s / 5.0) if on_cpu else math.inf, kernel_s)


def share(number: int, count: int) -> float:
    """Share of the time left in a report that a protocol gets, the `number`th of `count` from 0."""
    return FIRST if count > 1 and not number else 1 / (count - number)
