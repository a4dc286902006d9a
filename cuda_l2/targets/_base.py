"""What every machine answers for: its identity, its ceilings, and the bound they set for a task."""

from abc import ABC, abstractmethod
from typing import Any

from cuda_l2.records import Task


class Target(ABC):
    """A machine that candidates run on."""

    name: str
    """The kind, as given to --target."""

    @property
    @abstractmethod
    def machine(self) -> str:
        """Identity: trials of different machines never compare."""

    @abstractmethod
    def environment(self) -> dict[str, Any]:
        """What a reader needs to judge a figure: hardware, compiler, versions."""

    @abstractmethod
    def bound_us(self, task: Task) -> float:
        """The roofline bound in microseconds: the larger of FLOP over peak and bytes over bandwidth."""
