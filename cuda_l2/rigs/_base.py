"""What the evaluator asks of a machine: its stages for one shape, and which protocols they know."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cuda_l2.machine._base import Target
from cuda_l2.measure.baselines._base import Baseline
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.rounds import CANDIDATE, Kernel, Limits
from cuda_l2.measure.tuned import ADAPTIVE, TUNINGS
from cuda_l2.records import Build, Candidate, Gemm, Interval, Layout, Task, Timing, Verdict
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.turns import ALONE

B = TypeVar("B", bound=Baseline)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a rig when it is opened, for all tasks alike."""

    baselines: tuple[Baseline, ...] = ()  # of reports on matrix products; all where empty
    in_full: tuple[str, ...] = ()  # protocols with all of these; under others the tuned ones alone. All where empty
    retune: bool = False  # algorithms that earlier runs chose are chosen anew
    tuning: str = ADAPTIVE  # how they are timed: one of TUNINGS
    choices: Path | None = None  # file of chosen algorithms, used where it has them; it may not be there yet
    brute_s: float = 0.0  # seconds to search among cuBLASLt's configurations, a shape and layout; 0 for no search
    turns: Path | None = None  # folder of the files by which processes that judge on one GPU take turns

    def __post_init__(self) -> None:
        if self.tuning not in TUNINGS:
            raise UserError(f"there is no way of tuning {self.tuning!r}; choose from {', '.join(TUNINGS)}")

    @property
    def searches(self) -> dict[Layout, float]:
        """Seconds of search among cuBLASLt's configurations by the layout of B."""
        wanted = [each.layout for each in self.baselines if each.searched and each.layout and self.brute_s]
        return dict.fromkeys(wanted, self.brute_s)

    def reported(self, available: Sequence[B], protocol: str = "") -> list[B]:
        """The baselines that a report times, of those that are available; UserError where none is left."""
        wanted = [each for each in available if not self.baselines or each in self.baselines]
        tuned = [each for each in wanted if each.tuned]
        if tuned and self.in_full and protocol not in self.in_full:
            wanted = tuned
        if not wanted:
            raise UserError(f"no baseline is left to time: choose from {', '.join(each.name for each in available)}")
        return wanted


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Outcome of a candidate on a second device; a speedup where it was measured."""

    device: str
    machine: str
    status: str
    reason: str = ""
    speedup: Interval | None = None


class Bench(Closing):
    """The stages for one task. A context manager."""

    @abstractmethod
    def build(self, candidates: Sequence[Candidate]) -> Iterator[Build]:
        """Builds in order, several at once; those not asked for yet may still be running."""

    @abstractmethod
    def verify(self, candidate: Candidate, build: Build, *, full: bool = False) -> Verdict:
        """Whether a built candidate is correct. full: also by checks too slow for every candidate of a search."""

    def time(self, candidate: Candidate, build: Build, protocol: Protocol, limits: Limits = Limits()) -> Timing:
        """Time a correct candidate."""
        return self.time_kernels({CANDIDATE: Kernel(candidate, build)}, protocol, limits)[CANDIDATE]

    @abstractmethod
    def time_kernels(
        self, kernels: Mapping[str, Kernel], protocol: Protocol, limits: Limits = Limits()
    ) -> dict[str, Timing]:
        """Time several correct kernels of the task in one run, by name; without kernels a baseline in their place.

        On a GPU of a matrix product also those that read B in the other layout.
        """

    def time_baselines(self, protocol: Protocol) -> Timing:
        """Time the baselines alone; the usual strongest stands where a candidate would."""
        (timing,) = self.time_kernels({}, protocol).values()
        return timing

    def profile(self, candidate: Candidate, build: Build) -> dict[str, float]:
        """What the hardware's counters say of one launch, by short names; UserError where there are none to read."""
        raise UserError("only CUDA kernels can be profiled; give one, on a machine with an NVIDIA GPU")

    @abstractmethod
    def renew(self) -> None:
        """Let what comes next run in processes that ran nothing before."""

    def redraw(self, seed: int) -> None:
        """Let what comes next be verified and timed on other inputs, which come from this seed."""


class Rig(Closing):
    """One machine: target, baselines, processes. A context manager."""

    target: Target
    protocols: Mapping[str, Protocol]
    """By name; `search`, `finalists`, `offline`, `server` and `paper` are always among them."""
    gpu = ""
    """PCI address of the GPU that it measures on; empty for the CPU."""
    suffix: str
    """Suffix of candidates' files."""
    group = 8
    """Candidates a search proposes at once."""
    builds_disturb = False
    """Whether compiling disturbs timings, so that both share the machine's lock."""
    turns = ALONE
    """The turns that processes of one run take on its GPU."""
    measures = True
    """Whether the machine itself is at work, so that its lock is held meanwhile."""
    request: Request

    @abstractmethod
    def open(self, task: Task, seed: int, *, both_layouts: bool = False) -> Bench:
        """The stages for one task; inputs come from the seed. both_layouts: for kernels that read either.

        UserError where the task does not fit, or cannot be judged on this machine.
        """

    def reports(self, task: Task, protocols: Sequence[str]) -> list[str]:
        """Those of the protocols under which this task can be timed here; UserError where none is left."""
        return list(protocols)

    @abstractmethod
    def require_feasible(self, task: Task) -> None:
        """UserError where the task does not fit this machine."""

    def together(self, task: Task, asked: int) -> int:
        """How many of this many processes can judge a task at once on the machine."""
        return 1

    def require_tools(self) -> None:
        """UserError where a program is missing that full verification needs."""

    @abstractmethod
    def environment(self) -> dict[str, Any]:
        """What a reader needs to judge a figure."""

    def describe(self, gemm: Gemm, baseline: Baseline) -> dict[str, Any]:
        """What a baseline that was timed for this shape runs, as far as the target can tell."""
        return {}

    def keep_choices(self, gemms: Iterable[Gemm]) -> int:
        """Add the algorithms chosen for these tasks to the request's file; how many products it holds then."""
        return 0

    def elsewhere(self, task: Task, candidate: Candidate) -> Elsewhere | None:
        """What becomes of a candidate on a second device of this machine; None where there is none.

        Takes the machine's lock: not to be called by who holds it.
        """
        return None

    def prefetch(self, candidates: Sequence[Candidate]) -> Sequence[Callable[[], Build | None]]:
        """Begin to build what will be asked for later. For each a function that waits for its build; None from it where
        nothing has begun.
        """
        return [lambda: None] * len(candidates)
