"""What every machine answers for: its identity, its ceilings, the bound they set for a task, and a worker's faults."""

from abc import ABC, abstractmethod
from typing import Any

from cuda_l2.records import Task, VerdictStatus


class Target(ABC):
    """A machine that candidates run on."""

    name: str
    """The kind, as given to --target."""
    model: str
    """The hardware's own name."""

    @property
    @abstractmethod
    def machine(self) -> str:
        """Identity: trials of different machines never compare."""

    @abstractmethod
    def environment(self) -> dict[str, Any]:
        """What a reader needs to judge a figure: hardware, compiler, versions."""

    timed_as: str
    """How kernels are timed on it in a search, for those who write them."""

    def facts(self) -> dict[str, Any]:
        """What those who write kernels need to know of it."""
        return self.environment()

    @property
    @abstractmethod
    def features(self) -> tuple[float, float, float, float, float]:
        """What a schedule depends on in the machine, each of order one, for policies."""

    @property
    @abstractmethod
    def unit(self) -> tuple[str, float]:
        """In what throughput is told, and how many GFLOP/s that is: ("TFLOP/s", 1000.0)."""

    @abstractmethod
    def ceilings(self, dtype: str = "") -> tuple[float, float]:
        """Measured peak in `unit`, of products of this type's elements, and memory GB/s."""

    def ceilings_doubt(self, dtype: str = "") -> str:
        """Why the ceilings may be higher than measured; empty where nothing suggests it."""
        return ""

    @abstractmethod
    def bound_us(self, task: Task) -> float:
        """The roofline bound in microseconds: the larger of FLOP over peak and bytes over bandwidth."""

    @property
    @abstractmethod
    def cached_bytes(self) -> int:
        """What the largest cache holds."""

    def cache_may_beat_bound(self, task: Task) -> bool:
        """Whether the bound is memory's, for tensors that a cache holds: runs back to back may be faster."""
        _, gbytes = self.ceilings(task.dtype)
        return task.bytes <= self.cached_bytes and task.bytes / gbytes * 1e-3 >= self.bound_us(task)


class Fault(Exception):
    """A worker's process crashed, hung or did what the contract forbids; it is gone."""

    def __init__(self, status: VerdictStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason
