"""What the CPU can be asked besides, and the checks that ask it."""

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from cuda_l2.tasks.cases import Case
from cuda_l2.verify._base import Check, Outputs, Session


class CpuOnly(Session):
    """What a CPU can be asked besides."""

    @abstractmethod
    def launch_overtaken(self, case: Case, other: Case) -> Iterator[tuple[Case, Outputs]]:
        """Launches in a row on a case, whose inputs become another's wherever they have not begun once some are done.

        They are in every slot, of a slow kernel in some. The case that each launch met, and its outputs.
        """

    @abstractmethod
    def launch_apart(self, case: Case, count: int) -> Iterator[Outputs]:
        """`count` equal launches, or fewer heavy ones, in which threads begin their tasks some time apart, at random.

        None where there is one thread.
        """

    @abstractmethod
    def tasks_collide(self, case: Case) -> str:
        """Where two tasks of one parallel_for, of some that are looked at, change the same byte; empty where none do.

        Nothing is asked where there is one thread, or the source has atomic operations, which may order such tasks.
        """

    @abstractmethod
    def renew(self) -> npt.NDArray[np.uint8]:
        """Begin in a new process; what static variables hold there before any launch, with the rest of their pages."""

    @abstractmethod
    def statics(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """What the candidate's static variables hold, with the rest of their pages, and what it left on the stack."""

    @abstractmethod
    def set_statics(self, statics: npt.NDArray[np.uint8], stack: npt.NDArray[np.uint8]) -> None:
        """Let both hold what they held."""


class CpuCheck(Check):
    """A property that a CPU alone can be asked for."""

    device = "cpu"

    def applies(self, session: Session) -> bool:
        return isinstance(session, CpuOnly)

    def run(self, session: Session) -> None:
        assert isinstance(session, CpuOnly)
        self.run_on(session)

    @abstractmethod
    def run_on(self, session: CpuOnly) -> None:
        """The same, of a session that can answer."""
