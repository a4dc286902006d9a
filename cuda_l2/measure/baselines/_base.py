"""What a baseline is, and which there are. No GPU and no torch is needed to read their names.

A file of this folder lists its baselines in `BASELINES`; nothing else lists them.
"""

import functools
import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cuda_l2.measure.cublas import Launch
from cuda_l2.records import Accumulate, Gemm, Layout, Operation, Task
from cuda_l2.system.errors import UserError

if TYPE_CHECKING:
    from cuda_l2.measure.libraries import Libraries

Function = Callable[..., Any]
"""A task on tensors by name."""


@dataclass(frozen=True)
class Baseline:
    """An implementation that a user could call in place of a kernel.

    rank: its place where baselines are listed.
    """

    kind: str
    rank: int
    targets: tuple[str, ...] = ("cuda",)
    layout: Layout | None = None  # in which it reads B; the task's own where there is none
    accumulate: Accumulate | None = None  # the class in which it sums; the task's own where there is none
    tuned: bool = False  # it chooses an algorithm by timing several
    compiled: bool = False  # torch.compile makes it, which takes seconds
    searched: bool = False  # a search among configurations makes it, which takes seconds and must be asked for

    of: ClassVar[Any] = Task
    """The kind of task that it computes."""

    @property
    def name(self) -> str:
        """As it is printed and stored."""
        return self.kind if self.layout is None else f"{self.kind} {self.layout.name}"

    @property
    def autotuned(self) -> bool:
        """Whether it chooses among the algorithms that a library proposes."""
        return self.tuned and not self.searched

    def serves(self, task: Task) -> bool:
        """Whether it may compute the task, as far as the task alone says."""
        return isinstance(task, self.of)

    def usually_strongest(self, task: Task) -> bool:
        """Whether it is taken for the strongest before anything is timed; on a GPU a search compares with it alone."""
        return False

    def reads(self, layouts: Iterable[Layout | None]) -> bool:
        """Whether it reads B as one of these layouts has it."""
        return self.layout is None or self.layout in layouts


@dataclass(frozen=True)
class TorchBaseline(Baseline):
    """A function of PyTorch."""

    in_place: bool = False
    """Whether it writes outputs that it is given by name, instead of returning new tensors."""
    threads: int = 0
    """Number of torch's threads on a CPU; 0 for one a core."""

    @abstractmethod
    def bind(self, task: Any) -> Function:
        """The function for one task, on all of its inputs and weights by name."""


@dataclass(frozen=True)
class TorchProduct(TorchBaseline):
    """A matrix product by torch on the CPU."""

    targets: tuple[str, ...] = ("cpu",)
    in_place: bool = True
    of: ClassVar[Any] = Gemm

    def slow_s(self, task: Gemm, extensions: Collection[str]) -> float:
        """Seconds of a launch, about, where a CPU with these vector extensions lacks arithmetic in the type; else 0."""
        return 0.0


@dataclass(frozen=True)
class TorchTask(TorchBaseline):
    """PyTorch on a task other than a matrix product. graph_of: what it captures in a CUDA graph of ours."""

    targets: tuple[str, ...] = ("cpu", "cuda")
    graph_of: "TorchTask | None" = None
    of: ClassVar[Any] = Operation

    @property
    def called(self) -> "TorchTask":
        """The baseline whose function it launches."""
        return self.graph_of or self

    def bind(self, task: Operation) -> Function:
        return self.called.bind(task)


@dataclass(frozen=True)
class LibraryProduct(Baseline):
    """A matrix product by a library on the GPU: it writes C in place, from device addresses.

    It may be captured into a CUDA graph once it has been launched on the stream.
    """

    of: ClassVar[Any] = Gemm

    def b_layout(self, gemm: Gemm) -> Layout:
        """The layout of B that it reads."""
        return self.layout or gemm.layout

    def ready(self, libraries: "Libraries", gemm: Gemm) -> bool:
        """Whether it can compute the product here."""
        return True

    @abstractmethod
    def launcher(self, libraries: "Libraries", gemm: Gemm) -> Launch:
        """A function that enqueues one product. The first launch on a stream loads code and may allocate."""

    @abstractmethod
    def facts(self, libraries: "Libraries", gemm: Gemm) -> dict[str, Any]:
        """The library, types and algorithm that a launch uses, for the record."""

    def describe(self, libraries: "Libraries", gemm: Gemm) -> dict[str, Any]:
        """What it runs, for the record: its facts, and its kernels with their grids."""
        described = {
            "arm": self.name,
            "kernels": libraries.kernels(self.launcher(libraries, gemm)),
            "b_layout": str(self.b_layout(gemm)),
        }
        return described | self.facts(libraries, gemm)


@functools.cache
def all_baselines() -> dict[str, Baseline]:
    """Every baseline of this folder by name, in their rank."""
    package = importlib.import_module(__package__ or "")
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_"))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    found = sorted((each for module in modules for each in module.BASELINES), key=lambda each: each.rank)
    return {baseline.name: baseline for baseline in found}


def baselines_of(kind: type, target: str) -> list[Any]:
    """The baselines of a class on a target, in their rank."""
    return [each for each in all_baselines().values() if isinstance(each, kind) and target in each.targets]


def product_baselines(target: str) -> list[Baseline]:
    """The baselines of matrix products on a target, in their rank."""
    return [each for each in all_baselines().values() if each.of is Gemm and target in each.targets]


def library_baselines(libraries: "Libraries", gemm: Gemm) -> list[LibraryProduct]:
    """The baselines that compute a matrix product on this GPU, in their rank."""
    found: list[LibraryProduct] = baselines_of(LibraryProduct, "cuda")
    return [each for each in found if each.serves(gemm) and each.ready(libraries, gemm)]


def named(name: str) -> Baseline:
    """The baseline that a stored result names; UserError where this version has none of that name."""
    try:
        return all_baselines()[name]
    except KeyError:
        known = "; ".join(all_baselines())
        raise UserError(f"this version has no baseline {name!r}, which a result names; it has {known}") from None


def beginning(texts: Sequence[str], among: Sequence[Baseline]) -> list[Baseline]:
    """The baselines whose names begin with one of these texts, all where there is none.

    UserError where a text begins no name.
    """
    for text in texts:
        if not any(each.name.startswith(text) for each in among):
            names = ", ".join(each.name for each in among)
            raise UserError(f"no baseline's name begins with {text!r}; choose from {names}")
    return [each for each in among if each.name.startswith(tuple(texts) or "")]


def strongest_first(baselines: Iterable[Baseline], task: Task) -> list[Any]:
    """In their order, but the usual strongest of a task first."""
    return sorted(baselines, key=lambda each: not each.usually_strongest(task))
