"""What every check needs: a session that launches with hygiene watched, and how results are compared.

A check is one file here with a CHECK; it is picked up without edits elsewhere, and says for which tasks and devices it
is. Checks run in the order of their `order`, cheap and telling ones first, and the first failure ends the verdict.
Checks do not know where a candidate runs: tensors lie on the device of the case, and a Session launches.
"""

import importlib
import math
import pkgutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch

from cuda_l2.contract import ContractError
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda.sanitizer import Tool
from cuda_l2.machine.fills import POISONS
from cuda_l2.machine.tensors import Tensors, words
from cuda_l2.records import Build, Element, Task, Tensor, VerdictStatus
from cuda_l2.tasks.cases import Case, Cases
from cuda_l2.tasks.products import ProductCase, ProductCases

C = TypeVar("C", bound=Case)
S_contra = TypeVar("S_contra", contravariant=True)
LEAST_OFTEN = 8
"""Launches of a heavy kernel in a row."""
MOST_OFTEN_S, OFTEN_S, LAUNCH_S, OWN_GBYTES_PER_S, GFLOPS = 0.5, 0.06, 60e-6, 0.25, 20
"""About how long light launches in a row may take together on a CPU: each with what fills and compares its tensors."""
MOST_ANSWERS, ANSWERS_BYTES = 32, 64 << 20
"""Launches on a GPU whose comparisons are read back at once, and the bytes of their cases and outputs, about."""
Outputs = Tensors
"""Results by the names of outputs."""


class CheckFailed(Exception):
    """The candidate does not pass; ends its verification."""

    def __init__(self, status: VerdictStatus, reason: str, element: Element | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.element = status, reason, element


class TooMuchWorkspace(CheckFailed):
    """It asks for more workspace than there is."""


@dataclass(frozen=True)
class Turn(Generic[C]):
    """One of several launches in a row.

    what: of the case, for reasons. prefill: what outputs hold before it, poison if not given. keep: workspaces and
    shared memory stay as the launch before left them, where otherwise they hold garbage, and the tensors' addresses
    stay. place: of `Session.places`; any if not given.
    """

    case: C
    what: str = ""
    prefill: Outputs | None = None
    keep: bool = False
    place: int | None = None


class Judged:
    """One candidate in its process, and what checks find out about its errors. A context manager."""

    rms_error: float = float("nan")
    max_error: float = float("nan")
    max_allowed: float = float("nan")
    baseline_deviation: float = float("nan")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Session(Judged, ABC):
    """A candidate under the launch contract, ready to be launched on cases."""

    device = "cpu"
    task: Task
    build: Build
    cases: Cases

    @abstractmethod
    def launch(self, case: Case, prefill: Outputs | None = None, *, keep: bool = False) -> Outputs:
        """The outputs of one launch; CheckFailed where it touched what it must not or left elements unwritten.

        prefill, keep: as in `Turn`. ContractError where the case has sizes that the contract refuses.
        """

    def launch_each(self, turns: Iterable[Turn[C]]) -> Iterator[tuple[Turn[C], Outputs]]:
        """Launches on cases of the same sizes in order, each with its outputs as `launch` gives them.

        On a GPU several are made before the first one's outputs are given, as many as there is room for: no more turns
        are taken at once.
        """
        for turn in turns:
            yield turn, self.launch(turn.case, turn.prefill, keep=turn.keep)

    @abstractmethod
    def launch_on_one(self, case: Case) -> Outputs:
        """The outputs of one launch of a matrix product that finds B where A lies; the case's B has A's bytes."""

    def launch_often(self, case: Case, count: int) -> Iterator[Outputs]:
        """The outputs of the last of so many equal launches in a row, or of fewer heavy ones; it finds poison in place.

        What others leave in workspaces and elsewhere stays. On a GPU all this is done a few times, which gives outputs
        each time, in records that the next launches overwrite.
        """
        count, ends = min(count, max(LEAST_OFTEN, int(OFTEN_S / launch_s(case.task)))), math.inf
        if not case.task.flops:  # nobody has counted the work; where it was, a busy machine makes no launch fewer
            ends = time.perf_counter() + MOST_OFTEN_S
        found = self.launch(case, keep=True)
        for number in range(count):
            found = self.launch(case, keep=True)
            if number >= LEAST_OFTEN and time.perf_counter() > ends:
                break
        yield found

    def places(self) -> Sequence[int]:
        """Where launches of the task have tensors, on a GPU: together in every window that timed ones have."""
        return [0]

    @abstractmethod
    def require_served(self, task: Task) -> None:
        """ContractError where the contract does not take these sizes."""

    def require_room(self, task: Task, asked: int, most: int) -> None:
        """TooMuchWorkspace where these bytes of workspace are more than there are."""
        if asked > most:
            reason = f"asks for {asked} bytes of workspace for {task}; at most {most >> 20} MiB"
            raise TooMuchWorkspace(VerdictStatus.UNHYGIENIC, reason)

    def serves(self, task: Task) -> bool:
        """Whether the contract takes these sizes."""
        try:
            self.require_served(task)
        except ContractError:
            return False
        return True

    def as_timed(self) -> None:
        """From now on tensors lie where timed launches have them: a kernel must not behave there alone.

        On the CPU they always do.
        """


class GpuSession(Session):
    """A CUDA candidate: what goes on around a launch can be arranged too."""

    device = "cuda"
    sms: int
    programmatic: bool
    """Whether a launch may begin before the kernel ahead of it has ended."""
    constant: tuple[str, ...]
    """Names of inputs that it may read before."""

    @abstractmethod
    def launch_behind_producer(
        self, old: Case, case: Case, late: Tensor, between: int = 0, *, ordinary: bool = False
    ) -> Outputs:
        """The outputs for `case`, one of whose tensors holds `old`'s until a slow kernel before writes it.

        That kernel lets the next one begin at once, and so do the `between` kernels between it and the candidate.
        ordinary: the first of these waits for it all the same. late: the tensor; of an output the poison is written.
        """

    @abstractmethod
    def launch_before_reader_ends(self, case: Case, output: Tensor, between: int = 0) -> Outputs:
        """The outputs of a launch behind a slow kernel that reads what an output held before.

        That kernel lets the next one begin at once, and so do the `between` kernels between it and the candidate.
        CheckFailed where it reads anything but the poison.
        """

    @abstractmethod
    def launch_side_by_side(self, case: Case) -> Iterator[list[Outputs]]:
        """The outputs of launches whose tensors, or two of them, lie right behind one another, in several orders.

        The first launch has them apart. They lie in records that the launches of the next list overwrite.
        """

    @abstractmethod
    def as_shifted(self, gap: int) -> None:
        """From the next launch on tensors end so many bytes, a multiple of 16, before their memory ends."""

    @abstractmethod
    def launch_watched(self, case: Case) -> Outputs:
        """The outputs of one launch, while all memory that a candidate can reach is watched, ours too."""

    @abstractmethod
    def launch_guarded(self, case: Case) -> Outputs:
        """The outputs of one launch whose inputs and weights can only be read; CheckFailed where it writes there."""

    @abstractmethod
    def launch_beside_load(self, case: Case, count: int) -> Outputs:
        """The outputs after several launches while another stream holds half of the multiprocessors for a while."""

    @abstractmethod
    def launch_stressed(self, case: Case, seeds: Sequence[int], count: int) -> Iterator[Outputs]:
        """The outputs of each of `count` launches of builds with delays, one build a seed, beside load.

        They lie in records that the next launches overwrite.
        """

    @abstractmethod
    def plan_for(self, task: Task) -> Plan:
        """What would be launched at other sizes; ContractError where the contract refuses them."""

    @abstractmethod
    def sanitizes(self) -> bool:
        """Whether compute-sanitizer works on this machine; UserError where it is not installed."""

    @abstractmethod
    def sanitize(self, tool: Tool, task: Task, case: Case | None) -> str:
        """What one of its tools finds in launches at these sizes, in one line; empty where nothing.

        Without a case the inputs are normal numbers.
        """


class CheckOf(ABC, Generic[S_contra]):
    """One property that a correct candidate has, of one kind of session."""

    name: str
    order: int
    full_only = False
    """Whether it runs only where a kernel may enter the library: too slow for every candidate of a search."""

    @abstractmethod
    def run(self, session: S_contra) -> None:
        """Launch as needed; raise CheckFailed where the property does not hold."""

    def applies(self, session: S_contra) -> bool:
        """Whether the session's candidate must have it."""
        return True


class Check(CheckOf[Session]):
    """A property of candidates under the launch contract."""

    device = ""
    """Where candidates must have it: cpu, cuda, or empty for both."""
    products: bool | None = None
    """Whether it is one of matrix products, or of other tasks; None for both."""

    def applies(self, session: Session) -> bool:
        return self.device in ("", session.device) and self.products in (None, session.task.product)


class ProductCheck(Check):
    """A property of matrix products, on operands drawn for it."""

    products = True

    def run(self, session: Session) -> None:
        assert isinstance(session.cases, ProductCases)
        self.run_on(session, session.cases)

    @abstractmethod
    def run_on(self, session: Session, cases: ProductCases) -> None:
        """The same, with the session's cases."""


def all_checks() -> list[Check]:
    """Every check in this folder, in order."""
    checks: list[Check] = checks_in(__package__ or "")
    return checks


def checks_in(package_name: str) -> list[Any]:
    """The CHECK of every module of a package, in order."""
    package = importlib.import_module(package_name)
    names = [info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_")]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return sorted((module.CHECK for module in modules if hasattr(module, "CHECK")), key=lambda check: check.order)


def launch_s(task: Task) -> float:
    """About how many seconds a launch on a CPU takes, with what fills and compares its tensors."""
    return LAUNCH_S + (task.bytes / OWN_GBYTES_PER_S + task.flops / GFLOPS) * 1e-9


def first_difference(name: str, found: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> Element:
    """The first element of a matrix that `wrong` marks. name: the output's."""
    row, column = (int(i) for i in wrong.nonzero()[0])
    matrix = "C" if name == "c" else name
    return Element(row, column, float(expected[row, column]), float(found[row, column]), matrix)


def require_none(
    wrong: torch.Tensor, found: torch.Tensor, expected: torch.Tensor, status: VerdictStatus, reason: str
) -> None:
    """CheckFailed where `wrong` marks elements of C. reason: {share} and {element} stand for how many and the first."""
    if wrong.any():
        element = first_difference("c", found, expected, wrong)
        text = reason.format(share=f"{float(wrong.float().mean()):.1%}", element=element)
        raise CheckFailed(status, text, element)


def require_each(
    session: Session,
    turns: Iterable[Turn[C]],
    wrong: Callable[[Turn[C], Outputs], torch.Tensor],
    require: Callable[[Turn[C], Outputs], None],
) -> None:
    """Launch on cases in order; `require` raises for the first launch of which `wrong` marks anything.

    On a GPU the marks of several launches are read back at once, since each wait for the GPU costs time.
    """
    most = MOST_ANSWERS if session.device == "cuda" else 1
    outputs = sum(output.bytes for output in session.task.outputs)
    met: list[tuple[torch.Tensor, Turn[C], Outputs]] = []
    held = 0

    def settle() -> None:
        nonlocal held
        marked = torch.stack([mark for mark, *_ in met]).tolist() if met else []
        for (_, turn, found), wrong_there in zip(met, marked, strict=True):
            if wrong_there:
                require(turn, found)
        met.clear()
        held = 0

    try:
        for turn, found in session.launch_each(turns):
            met.append((wrong(turn, found).any(), turn, found))
            held += outputs + turn.case.bytes
            if len(met) >= most or held > ANSWERS_BYTES:
                settle()
    except Exception:  # what came before is the reason where it is wrong
        settle()
        raise
    settle()


def require_expected(
    session: Session,
    turns: Iterable[Turn[ProductCase]],
    wrong: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    status: VerdictStatus,
    reason: str,
) -> None:
    """CheckFailed where C is not what a case expects. wrong: marks elements, of C and of what is expected.

    reason: {what} stands for the turn's, the others as in `require_none`.
    """

    def marks(turn: Turn[ProductCase], found: Outputs) -> torch.Tensor:
        return wrong(found["c"], turn.case.expected["c"])

    def require(turn: Turn[ProductCase], found: Outputs) -> None:
        text = reason.replace("{what}", turn.what) + turn.case.hint(found)
        require_none(marks(turn, found), found["c"].float(), turn.case.expected["c"], status, text)

    require_each(session, turns, marks, require)


def require_all_right(session: Session, turns: Iterable[Turn[C]]) -> None:
    """CheckFailed where the result of a launch is not within the task's tolerance."""
    require_each(
        session,
        turns,
        lambda turn, found: turn.case.wrong(found),
        lambda turn, found: require_right(turn.case, found, turn.what),
    )


def require_right(case: Case, found: Outputs, where: str) -> None:
    """CheckFailed where a result is not within the task's tolerance; where: on which inputs, for the reason."""
    violation = case.violation(found)
    if violation:
        status = VerdictStatus.IMPRECISE if case.imprecise(found) else VerdictStatus.INCORRECT
        raise CheckFailed(status, f"{violation} ({where}){case.hint(found)}", case.first_wrong(found))


def differs(found: Outputs, right: Outputs) -> torch.Tensor:
    """Whether a result has other bits than the right one, on its device."""
    return torch.stack([(words(found[name]) != words(tensor)).any() for name, tensor in right.items()]).any()


def require_same(found: Outputs, right: Outputs, reason: str) -> None:
    """CheckFailed where a result has other bits than the right one."""
    for name, tensor in right.items():
        if not torch.equal(words(found[name]), words(tensor)):
            differ = words(found[name]) != words(tensor)
            index = [int(i) for i in differ.nonzero()[0]]
            element = first_difference(name, found[name], tensor, differ) if differ.dim() == 2 else None
            raise CheckFailed(VerdictStatus.UNHYGIENIC, f"{reason}: {name}{index}", element)


def require_written(output: Tensor, found: torch.Tensor) -> None:
    """CheckFailed where an output still holds its poison. One byte of it may be right: other checks see those."""
    poison = POISONS[output.dtype]
    if len(poison) == 1 or not found.numel():
        return
    unwritten = words(found) == int.from_bytes(poison, "little")
    if unwritten.any():
        index = [int(i) for i in unwritten.nonzero()[0]]
        count = f"{int(unwritten.sum())} of {found.numel()}"
        reason = f"left {count} elements of {output.name} unwritten, the first at {index}"
        raise CheckFailed(VerdictStatus.INCORRECT, reason)
