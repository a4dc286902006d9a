"""Records of a file that was tried: whether it can be a task, and why not."""

import enum
import math
from dataclasses import dataclass

from cuda_l2.records import Operation
from cuda_l2.system.errors import UserError


class Readiness(enum.StrEnum):
    """Whether a file can be a task, and what stands in the way."""

    READY = "ready"
    MALFORMED = "malformed"  # not in the format
    IMPORT_ERROR = "import-error"
    NEEDS_PACKAGE = "needs-package"
    NEEDS_GPU = "needs-gpu"
    TOO_LARGE = "too-large"  # for the memory allowed
    UNSUPPORTED = "unsupported"  # takes or gives what a task cannot name
    REFERENCE_FAILS = "reference-fails"
    RANDOM = "random"
    STATEFUL = "stateful"  # another result every time it runs
    CONSTANT = "constant"  # the same result whatever it is given
    NOT_EXACT = "not-exact"  # no fp64 result to measure errors by
    TIMED_OUT = "timed-out"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of one file. Budgets: sizes are halved until verifying fits them; 0 leaves sizes as written."""

    timeout_s: float = 120.0
    memory_bytes: int = 8 << 30  # of a process, and of all of a file's together
    budget_bytes: int = 1 << 28
    budget_flops: int = 4 * 10**9
    device: str = "cpu"  # where references run: cpu or cuda


class Refused(UserError):
    """A file does not give what was asked for. status: why, as of a file that is no task; where: its path."""

    def __init__(self, status: Readiness, reason: str, where: str = "") -> None:
        super().__init__(": ".join(filter(None, (where, status, reason))))
        self.status, self.reason = status, reason


@dataclass(frozen=True, slots=True)
class Examined:
    """One file of a checkout, tried once."""

    name: str
    status: Readiness
    reason: str = ""
    task: Operation | None = None  # at the sizes it was tried at
    written_bytes: int = 0  # that a run moves at the sizes as written; 0 where that is not known
    sizes: tuple[tuple[str, int], ...] = ()  # all of the file's, as they were tried
    variable: tuple[str, ...] = ()  # sizes that may change while the weights stay
    keeps_numbers: bool = False  # its module draws some that are neither parameters nor buffers
    distributions: tuple[str, ...] = ()  # of values on which its results are finite
    seconds: float = math.nan  # of one run of the reference
    moves_buffers: bool = False  # its reference changes its own buffers, as batch norm does in training
    eager_max: float = math.nan  # eager's largest error against fp64, over all outputs
    max_allowed: float = math.nan

    def __post_init__(self) -> None:
        if (self.status is Readiness.READY) != (self.task is not None) or (self.task is None) != bool(self.reason):
            raise ValueError("a file is ready with a task, or not with a reason")
