"""What GPU families of tasks share: a table of operations, common choices, contracts as text."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cuda_l2.families._base import Choice, Family, Schedule, toml_list
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import DTYPE_BYTES, Operation

DTYPES = {"float32": 32, "float16": 16, "bfloat16": 17}
"""What gpu_task.cuh calls the task's type."""
VECTOR_BYTES = 16
MAX_THREADS_PER_SM = 2048
SPARE_SHARED_BYTES = 2048
"""Kept free for static shared memory and for what a stress build adds."""

VEC = Choice("VEC", (1, 2, 4, 8), "elements a load")
THREADS = Choice("THREADS", (64, 128, 256, 512, 1024), "a block")
LOAD = Choice("LOAD", (0, 1, 2), "0 plain, 1 evict first, 2 around L1")
STORE = Choice("STORE", (0, 1), "1 evict first")
ITEMS = Choice("ITEMS", (1, 2, 4, 8), "vectors of each operand that a thread has in flight")
BLOCKS = Choice("BLOCKS", (1, 2, 4, 8, 16), "a multiprocessor", compiled=False)
TAIL = Choice("TAIL", (0, 1), "who adds up what blocks found: 0 a launch of its own, 1 the block that ends last")
QUICK = Choice("QUICK", (0, 1), "1 takes exponentials and quotients from the hardware's approximations")


@dataclass(frozen=True, slots=True)
class Computed:
    """One operation of a source. shapes: of the task's tensors in its order, dimensions as the contract names them."""

    number: int
    shapes: tuple[str, ...]
    quick: bool = False  # whether it has exponentials or quotients


class GpuTaskFamily(Family):
    """A CUDA kernel for several tasks."""

    products = False
    table: ClassVar[Mapping[str, Computed]]

    def serves(self, task: Operation, target: Target) -> bool:
        return isinstance(target, CudaTarget) and task.name in self.table and task.dtype in DTYPES and not task.revision

    def fits(self, name: str, value: int, chosen: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        """Whether a value is worth compiling after the ones chosen; each choice always has one that is."""
        if name == "QUICK":
            return not value or self.table[task.name].quick
        return self.fits_work(name, value, {**chosen, name: value}, task, target)

    @abstractmethod
    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        """The same for the choices of this family alone; choice: those chosen, and this one."""

    @abstractmethod
    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        """What an engineer would try first; the nearest valid values are taken."""

    def default(self, task: Operation, target: CudaTarget) -> tuple[int, ...]:
        far = int(streams(task, target))
        wanted = {"LOAD": far, "STORE": far, "QUICK": 1, **self.wanted(task, target)}
        return self.nearest(wanted, task, target)

    def macros(self, schedule: Schedule) -> dict[str, int]:
        task = schedule.task
        return {"OPERATION": self.table[task.name].number, "DTYPE": DTYPES[task.dtype]}

    def buffers(self, task: Operation) -> list[str]:
        """[[buffer]] entries for the task's tensors."""
        lines: list[str] = []
        for (kind, tensor), shape in zip(task.parts, self.table[task.name].shapes, strict=True):
            lines += ["[[buffer]]", f'name = "{tensor.name}"', f"shape = {toml_list(shape.split())}"]
            lines += [f'dtype = "{tensor.dtype}"', f'kind = "{kind}"', ""]
        return lines


def element_bytes(task: Operation) -> int:
    """Bytes of an element of the task's type."""
    return DTYPE_BYTES[task.dtype]


def widest(task: Operation) -> int:
    """Most elements a load."""
    return VECTOR_BYTES // element_bytes(task)


def streams(task: Operation, target: CudaTarget) -> bool:
    """Whether a launch moves more than the second-level cache holds for the next one."""
    return task.bytes > target.l2_bytes // 2


def head(names: Mapping[str, str], arch: str = "sm_80", sizes: Sequence[str] = ()) -> list[str]:
    """A contract's top level. names: expressions by name; sizes: the task's own that expressions use."""
    lines = ['target = "cuda"', f'arch = "{arch}"']
    if sizes:
        lines.append(f"sizes = {toml_list(sizes)}")
    return [*lines, "[names]", *(f'{name} = "{value}"' for name, value in names.items()), ""]


def launch(
    kernel: str,
    grid: Sequence[str | int],
    threads: int,
    args: Sequence[str],
    shared_bytes: int | str = 0,
    cluster: int = 1,
) -> list[str]:
    """A [[launch]] entry. args: names, or scalars as in `int32 = "rows"`."""
    passed = ", ".join(f"{{{arg}}}" if "=" in arg else f'"{arg}"' for arg in args)
    sizes = toml_list(map(str, grid))
    lines = ["[[launch]]", f'kernel = "{kernel}"', f"grid = {sizes}", f"block = [{threads}]", f"args = [{passed}]"]
    lines += [f'shared_bytes = "{shared_bytes}"'] * (shared_bytes not in (0, "0"))
    return [*lines, *[f"cluster = [{cluster}]"] * (cluster > 1), ""]


def workspace(name: str, size: str, *, persistent: bool = False) -> list[str]:
    """A [[workspace]] entry of so many bytes; a persistent one begins with zeros."""
    return ["[[workspace]]", f'name = "{name}"', f'bytes = "{size}"', 'kind = "persistent"' * persistent, ""]
