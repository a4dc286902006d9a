"""Loops in the PTX that only poll, until something has changed: which give up, and which wait for other blocks.

Both are right as long as memory is quick and the device empty, so that no launch shows them. A spin here is a loop
without another in it that does nothing but poll one address, compare and sleep. The address is followed through
registers, so that a sum over volatile loads is no spin.

Not covered: polls by atomics, by vector loads (`ld.volatile.global.v2`) and of global memory at a scope within a
cluster; spins that do something else beside; a spin in a `.noinline` function whose store is in the entry; limits that
are no constants, or are reached by a count that depends on what was read; counts that unrolling has taken apart; and
waits that give up in a function that has another wait without a limit.

Rules after the PTX ISA (mbarrier.try_wait) and the CUDA programming guide (grid synchronization).
"""

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from cuda_l2.build import unpaired
from cuda_l2.contract import CudaContract

LONG_LOOP = 256
"""A loop of more instructions than this is no spin: what depends on what takes their square to find."""
MANY_POLLS = 1 << 20
"""A loop that gives up after this many polls or more ends a fault; it does not replace a wait."""

_STATEMENT = re.compile(r"[^;{}]+")
_LABEL = re.compile(r"\s*([\w$]+)\s*:(?!:)")
_PARTS = re.compile(r"\s*(?:@(!?[\w$%]+)\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)", re.DOTALL)
_NAME = re.compile(r"(?<![\w$.])[%A-Za-z_$][\w$]*")
_NUMBER = re.compile(r"(?<![\w$%.])-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9][0-9]{0,19})U?(?![\w.])")
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
    def polls(self) -> bool:
        """Whether it reads what another thread, or a copy, may change."""
        if self.name == "mbarrier":
            return self.modifiers.startswith((".test_wait", ".try_wait"))
        return self.name == "ld" and bool(re.search(r"\.(?:acquire|relaxed|volatile|mmio)\b", self.modifiers))

    @property
    def polls_beyond_its_cluster(self) -> bool:
        return self.name == "ld" and self.polls and not re.search(r"\.(?:shared|cta|cluster)\b", self.modifiers)


@dataclass(frozen=True, slots=True)
class _Spin:
    """A loop that only polls.

    held: for each instruction the registers that decide whether it runs. leaves: those that decide whether the loop
    goes on. users: for each register those computed from it. text: the function's.
    """

    body: tuple[_Instruction, ...]
    held: tuple[frozenset[str], ...]
    leaves: frozenset[str]
    users: dict[str, set[str]]
    text: str

    def follows(self, begin: set[str], but: Set[str] = frozenset()) -> set[str]:
        """The registers that depend on these, by what the loop computes, not through the registers `but`."""
        found, left = set(begin), list(begin)
        while left:
            new = self.users.get(left.pop(), set()) - found - but
            found |= new
            left += new
        return found

    @property
    def counters(self) -> dict[str, set[str]]:
        """The registers that sums in the loop add to, each with those on the way to its next value."""
        after = {each.to: self.follows({each.to}) for each in self.body}
        adds = [each.to for each in self.body if each.name in ("add", "sub") and each.given & after[each.to]]
        return {to: {each for each in after[to] if to in after.get(each, ())} for to in adds}

    def _counts_progress(self, cycle: set[str]) -> bool:
        """Whether the count grows by what was read, and only the count ends the loop."""
        read = self.follows({each.to for each in self.body if each.polls}, cycle)
        steps = (each.given | held for each, held in zip(self.body, self.held, strict=True) if each.to in cycle)
        return not read & self.leaves and any(step & read for step in steps)

    def limit(self) -> int:
        """After how many polls it gives up; 0 where it does not, or where no constant says."""
        cycles = [cycle for cycle in self.counters.values() if not self._counts_progress(cycle)]
        counters = {register for cycle in cycles for register in cycle}
        counted = self.follows(counters)
        if not counted & self.leaves:
            return 0
        limits = [
            abs(number) for each in self.body if each.name == "setp" and each.given & counted for number in each.numbers
        ]
        for register in counters:
            begun = re.findall(rf"\bmov\.[bsu]\d+\s+{re.escape(register)},\s*(-?\w+)\s*;", self.text)
            limits += [abs(_number(number)) for number in begun if _NUMBER.fullmatch(number)]
        return max(limits, default=0)


def refuse(ptx: str) -> str:
    """Why the PTX is refused, in one line; empty where it is not."""
    for body in unpaired.functions(ptx):
        if re.search(r"\btrap\b", body):  # who gives up may end so
            continue
        limits = [spin.limit() for spin in _spins(body)]
        if limits and all(1 < limit < MANY_POLLS for limit in limits):  # else polls at first may be quick ones
            return f"a wait gives up after {limits[0]} polls, and goes on with what is there then: wait without a limit"
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
            seen = {each.to for each in spin.body if each.polls_beyond_its_cluster}
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


def _number(text: str) -> int:
    """The value of an integer as PTX writes it: octal behind a leading zero, unsigned before a U."""
    return int(re.sub(r"^(-?0)(?=[0-7])", r"\1o", text.rstrip("U")), 0)


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
        numbers = tuple(_number(number) for number in _NUMBER.findall(others))
        statements.append(_Instruction((guard or "").lstrip("!"), name, modifiers, to, given, numbers))
        begin = places.get(to) if name == "bra" else None
        if begin is None:
            continue
        loop = tuple(statements[begin:])
        nested = any(begin <= header for header in headers)
        headers.append(begin)
        polls = [each for each in loop if each.polls]
        if (
            nested
            or not polls
            or len(loop) > LONG_LOOP
            or any(each.name not in _QUIET and not each.polls for each in loop)
        ):
            continue
        inside = {label for label, at in places.items() if at > begin}
        last = len(loop) - 1
        leaving = [each for i, each in enumerate(loop) if each.name == "bra" and (i == last or each.to not in inside)]
        held = [frozenset({each.guard} - {""}) for each in loop]
        for i, each in enumerate(loop):
            if each.name == "bra" and each.to in inside:
                for over in range(i + 1, places[each.to] - begin):
                    held[over] |= held[i]
        users: dict[str, set[str]] = {}
        for each in loop:
            for register in each.given if each.name != "bra" else ():
                users.setdefault(register, set()).add(each.to)
        spin = _Spin(loop, tuple(held), frozenset(each.guard for each in leaving) - {""}, users, body)
        if not any(spin.follows(set(spin.counters)) & each.given for each in polls):
            yield spin
