"""Loops in the PTX that only look, until something has changed: who gives up, and who waits for other blocks.

Both are right as long as memory is quick and the device empty, so that no launch shows them. A spin here is a loop
without another in it that does nothing but look at one address, compare and sleep. What it looks at is followed through
registers, so that a sum over volatile loads is none. Not covered: looks by atomics, spins that do something else
beside, limits that are no constants, and counts that unrolling has taken apart.

Rules after the PTX ISA (mbarrier.try_wait) and the CUDA programming guide (grid synchronization).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cuda_l2.build import unpaired
from cuda_l2.contract import CudaContract

MANY_POLLS = 1 << 20
"""A loop that gives up after more looks than this ends a fault; it does not replace a wait."""

_STATEMENT = re.compile(r"[^;{}]+")
_LABEL = re.compile(r"\s*([\w$]+)\s*:(?!:)")
_PARTS = re.compile(r"\s*(?:@(!?[\w$%]+)\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)", re.DOTALL)
_NAME = re.compile(r"(?<![\w$.])[%A-Za-z_$][\w$]*")
_NUMBER = re.compile(r"(?<![\w$%.])-?(?:0[xX][0-9a-fA-F]+|\d+)(?![\w.])")
_QUIET = frozenset(
    {"add", "sub", "mul", "mad", "min", "max", "neg", "and", "or", "xor", "not", "shl", "shr", "lop3", "setp", "set"}
    | {"selp", "mov", "cvt", "cvta", "nanosleep", "bra", "fence", "membar", "activemask", "vote"}
)
_CHANGING = re.compile(
    r"(?<![\w.%])(?:(?:atom|red)\.|st\.(?=[\w.:]*\b(?:release|relaxed|volatile|mmio)\b))(?![\w.:]*shared)"
)
_TOOK = re.compile(r"(?<![\w.%])atom\.(?![\w.:]*shared)[\w.:]+\s+(%\w+)")


@dataclass(frozen=True, slots=True)
class _Instruction:
    """guard: the register that decides whether it runs. to: its first operand. given: the names in the others."""

    guard: str
    name: str
    modifiers: str
    to: str
    given: frozenset[str]
    numbers: tuple[int, ...]

    @property
    def looks(self) -> bool:
        """Whether it looks at what another thread, or a copy, may change."""
        if self.name == "mbarrier":
            return self.modifiers.startswith((".test_wait", ".try_wait"))
        return self.name == "ld" and bool(re.search(r"\.(?:acquire|relaxed|volatile|mmio)\b", self.modifiers))

    @property
    def looks_beyond_its_block(self) -> bool:
        return self.name == "ld" and self.looks and ".shared" not in self.modifiers


@dataclass(frozen=True, slots=True)
class _Spin:
    """A loop that only looks. leaves: the registers that decide whether it goes on. text: the function's."""

    body: tuple[_Instruction, ...]
    leaves: frozenset[str]
    text: str

    def follows(self, begin: set[str]) -> set[str]:
        """The registers that depend on these, by what the loop computes."""
        found, grown = set(begin), True
        while grown:
            new = {each.to for each in self.body if each.name != "bra" and each.given & found} - found
            found, grown = found | new, bool(new)
        return found

    @property
    def counters(self) -> set[str]:
        return {each.to for each in self.body if each.name in ("add", "sub") and each.to in each.given}

    def polls(self) -> int:
        """After how many looks it gives up; 0 where it does not, or where no constant says."""
        counted = self.follows(self.counters)
        if not counted & self.leaves:
            return 0
        limits = [
            abs(number) for each in self.body if each.name == "setp" and each.given & counted for number in each.numbers
        ]
        for register in self.counters:
            begun = re.findall(rf"\bmov\.[bsu]\d+\s+{re.escape(register)},\s*(-?\w+)\s*;", self.text)
            limits += [abs(int(number, 0)) for number in begun if _NUMBER.fullmatch(number)]
        return max(limits, default=0)


def refuse(ptx: str) -> str:
    """Why the PTX is refused, in one line; empty where it is not."""
    for body in unpaired.functions(ptx):
        if re.search(r"\btrap\b", body):  # who gives up may end so
            continue
        for spin in _spins(body):
            if 1 < (polls := spin.polls()) < MANY_POLLS:
                return f"a wait gives up after {polls} looks, and goes on with what is there then: wait without a limit"
    return ""


def waiting(ptx: str) -> tuple[str, ...]:
    """The kernels whose blocks wait for what other blocks of the same launch store.

    Not those that take a number or a lock first: who waits for lower numbers alone need not be resident with all.
    """
    found = []
    for body in unpaired.functions(ptx):
        name = re.match(r"\s*([\w$]+)", body)
        if not name or not _CHANGING.search(body):
            continue
        if any(len(re.findall(rf"{re.escape(taken)}\b", body)) > 1 for taken in _TOOK.findall(body)):
            continue
        for spin in _spins(body):
            seen = {each.to for each in spin.body if each.looks_beyond_its_block}
            if seen and spin.follows(seen) & spin.leaves:
                found.append(name[1])
                break
    return tuple(found)


def refuse_alone(waiting: Sequence[str], contract: CudaContract) -> str:
    """Why launches of kernels whose blocks wait for one another are refused, in one line; empty where they are not."""
    for number, launch in enumerate(contract.launches, 1):
        if launch.kernel in waiting and not launch.coresident:
            return (
                f"launch {number}: blocks of {launch.kernel} wait for what others of them store, and where not all are"
                " resident these may never start: coresident = true, or take a number by an atomic and wait for lower"
                " ones alone"
            )
    return ""


def _spins(body: str) -> Iterator[_Spin]:
    """The spins of a function's text."""
    places: dict[str, int] = {}
    headers: list[int] = []
    statements: list[_Instruction] = []
    for statement in _STATEMENT.findall(body):
        while label := _LABEL.match(statement):
            places[label[1]] = len(statements)
            statement = statement[label.end() :]
        parts = _PARTS.fullmatch(statement)
        if not parts:
            continue
        guard, name, modifiers, operands = parts.groups()
        first, _, others = operands.partition(",")
        names = _NAME.findall(first)
        to = names[0] if names else ""
        given = frozenset(_NAME.findall(others)) | (frozenset(names) if name in ("bra", "nanosleep") else frozenset())
        numbers = tuple(int(number, 0) for number in _NUMBER.findall(others))
        statements.append(_Instruction((guard or "").lstrip("!"), name, modifiers, to, given, numbers))
        begin = places.get(to) if name == "bra" else None
        if begin is None:
            continue
        loop = tuple(statements[begin:])
        nested = any(begin <= header for header in headers)
        headers.append(begin)
        looked = [each for each in loop if each.looks]
        if nested or not looked or any(each.name not in _QUIET and not each.looks for each in loop):
            continue
        inside = {label for label, at in places.items() if at > begin}
        last = len(loop) - 1
        leaving = [each for i, each in enumerate(loop) if each.name == "bra" and (i == last or each.to not in inside)]
        spin = _Spin(loop, frozenset(each.guard for each in leaving) - {""}, body)
        if not any(spin.follows(spin.counters) & each.given for each in looked):
            yield spin
