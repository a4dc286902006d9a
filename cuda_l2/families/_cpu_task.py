"""What CPU families of tasks share: a table of operations on matrices of floats, contracts and choices."""

import platform
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cuda_l2.families._base import Choice, Family, Schedule, toml_list
from cuda_l2.machine._base import Target
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.records import Operation

VECTOR_BITS = Choice("VECTOR_BITS", (128, 256, 512), "vector width in bits")
THREADS = Choice("THREADS", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128), "threads that share the work")
UNROLL = Choice("UNROLL", (1, 2, 4, 8), "vectors in flight")
STREAM = Choice("STREAM", (0, 1), "1 stores around the caches")
DEGREE = Choice("DEGREE", (5, 6), "of the exponential's polynomial")
ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Types of a task's matrices, as sources number them."""
SHAPES = {"matrix": ["rows", "columns"], "row": ["rows"], "column": ["columns"], "number": []}


@dataclass(frozen=True, slots=True)
class Computed:
    """One operation of a source. given, out: how each of the task's tensors lies, in its order."""

    number: int
    given: tuple[str, ...] = ("matrix",)
    out: str = "matrix"
    exponential: bool = False
    kept: bool = False  # whether exponentials may be kept in the output
    total: bool = False  # whether rows' numbers are added up in the workspace
    dtypes: tuple[str, ...] = tuple(ELEMENTS)


class CpuTaskFamily(Family):
    """A CPU kernel for several tasks on matrices."""

    products = False
    suffix = ".c"
    entry: str
    table: ClassVar[Mapping[str, Computed]]

    def serves(self, task: Operation, target: Target) -> bool:
        return (
            isinstance(target, CpuTarget)
            and task.name in self.table
            and task.dtype in self.table[task.name].dtypes
            and not task.revision
        )

    def fits(self, name: str, value: int, chosen: dict[str, int], task: Operation, target: CpuTarget) -> bool:
        """Whether a value is worth compiling after the ones chosen; each choice always has one that is."""
        computed = self.table[task.name]
        match name:
            case "VECTOR_BITS":
                return max(128, target.vector_bits // 2) <= value <= target.vector_bits
            case "THREADS":
                return value <= target.cores
            case "STREAM":
                able = (
                    task.dtype == "float32"
                    and platform.machine() == "x86_64"
                    and chosen["VECTOR_BITS"] > 128
                    and computed.out == "matrix"
                )
                return not value or (able and not chosen.get("KEEP"))
            case "KEEP":
                return not value or (computed.kept and task.dtype == "float32")
            case "DEGREE":
                return computed.exponential or value == DEGREE.values[-1]
        return self.fits_work(name, value, task, chosen)

    @abstractmethod
    def fits_work(self, name: str, value: int, task: Operation, chosen: dict[str, int]) -> bool:
        """The same for the choices of this family alone."""

    @abstractmethod
    def wanted(self, task: Operation, target: CpuTarget) -> dict[str, int]:
        """What an engineer would try first; the nearest valid values are taken."""

    def default(self, task: Operation, target: CpuTarget) -> tuple[int, ...]:
        wanted = {"VECTOR_BITS": target.vector_bits, "THREADS": target.cores, "UNROLL": 4}
        wanted["STREAM"] = int(far(task, target))
        wanted |= {"DEGREE": 6, **self.wanted(task, target)}
        return self.nearest(wanted, task, target)

    def workspace(self, schedule: Schedule) -> str:
        """Bytes of workspace as the contract states them; empty for none."""
        return "4 * rows" if self.table[schedule.task.name].total else ""

    def macros(self, schedule: Schedule) -> dict[str, int]:
        return {"OPERATION": self.table[schedule.task.name].number, "ELEMENT": ELEMENTS[schedule.task.dtype]}

    def contract(self, schedule: Schedule) -> str:
        task, computed = schedule.task, self.table[schedule.task.name]
        lines = ['target = "cpu"', f'entry = "{self.entry}"', f"threads = {schedule.named['THREADS']}"]
        if workspace := self.workspace(schedule):
            lines.append(f'workspace = "{workspace}"')
        for (kind, tensor), lies in zip(task.parts, (*computed.given, computed.out), strict=True):
            lines += ["", "[[buffer]]", f'name = "{tensor.name}"', f"shape = {toml_list(SHAPES[lies])}"]
            lines += [f'dtype = "{tensor.dtype}"'] * (tensor.dtype != "float32")
            lines += [f'kind = "{kind}"'] * (kind != "input")
        return "\n".join(lines)


def far(task: Operation, target: CpuTarget) -> bool:
    """Whether what a launch stores is not likely to be in the second-level cache when it is read again."""
    return 2 * task.bytes > max(target.cache_bytes[1], 1 << 20)
