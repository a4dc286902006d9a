"""Static variables and the stack hold what the launch that wrote them put there: none counts, none remembers.

Equal launches are made behind different ones. What each of them changes in static variables must then hold the same;
what it leaves alone may hold anything. On the stack it is what pairs of equal launches change behind either: the first
may take another way through the kernel, as where results are kept, and leave other things there. Where launches behind
one and the same are not repeatable, threads take turns, and nothing is asked.

What launches have written in static variables is then lost, here and there: a table that the first one made for all
others is not there any more, and results must be right all the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cuda_l2.machine._base import Fault
from cuda_l2.records import VerdictStatus
from cuda_l2.verify._base import CheckFailed, require_same
from cuda_l2.verify._cpu_only import CpuCheck, CpuOnly

REPEATS, BEFORE = 3, 2
MORE = 16
"""Further pairs of launches from either beginning where these show a difference: threads that take turns may do so
alike for a while, and otherwise afterwards."""

LOSSES, LEAST_LOST = 12, 2.0**-6
"""Times that a part of what was written is lost, at a random place and of a random length, log-uniform from this
share of it all: what remembers something may look at other parts of it first."""

Held = npt.NDArray[np.uint8]


class Seen(NamedTuple):
    """Before a pair of equal launches, or after it; the statics after the first of them."""

    statics: Held
    stack: Held


class Statics(CpuCheck):
    name = "statics"
    order = 58

    def run_on(self, session: CpuOnly) -> None:
        case, other = session.cases.drawn("state 0"), session.cases.drawn("state 1")
        loaded = session.renew()
        right = session.launch(case)

        begins = [Seen(*session.statics())]
        found: tuple[list[Seen], list[Seen]] = [], []
        if not any(map(len, begins[0])):
            return
        for _ in range(BEFORE):
            session.launch(other, keep=True)
        begins.append(Seen(*session.statics()))

        def repeat(count: int) -> None:
            """What is there after as many pairs of equal launches from either beginning, by turns: clocks go on."""
            for _ in range(count):
                for start, ends in zip(begins, found, strict=True):
                    session.set_statics(*start)
                    session.launch(case, keep=True)
                    statics, _ = session.statics()
                    session.launch(case, keep=True)
                    ends.append(Seen(statics, session.statics()[1]))

        repeat(REPEATS)
        if _where(begins, found):
            repeat(MORE)
        where = _where(begins, found)
        if where:
            reason = f"keeps state {where}: what is there after a launch depends on the launches before it"
            raise CheckFailed(VerdictStatus.UNHYGIENIC, reason)
        statics, stack = session.statics()
        written = np.flatnonzero(statics != loaded) if len(statics) == len(loaded) else np.arange(0)
        for _ in range(LOSSES if len(written) else 0):
            share = LEAST_LOST ** session.cases.rng.random()
            first = int(session.cases.rng.integers(len(written)))
            lost, at = statics.copy(), written[first : first + max(1, int(share * len(written)))]
            lost[at] = session.cases.rng.integers(256, size=len(at), dtype=np.uint8)
            session.set_statics(lost, stack)
            reason = "keeps state in static variables: its result depends on what a launch before it wrote there"
            try:
                outputs = session.launch(case, keep=True)
            except Fault as fault:
                raise CheckFailed(VerdictStatus.UNHYGIENIC, f"{reason}: {fault.reason}") from None
            require_same(outputs, right, reason)


def _where(begins: Sequence[Seen], ends: Sequence[Sequence[Seen]]) -> str:
    """Where launches leave what depends on the ones before; empty where nowhere."""
    if _differ([each.statics for each in begins], [[each.statics for each in some] for some in ends], np.logical_or):
        return "in static variables"
    if _differ([each.stack for each in begins], [[each.stack for each in some] for some in ends], np.logical_and):
        return "on the stack"
    return ""


def _differ(begins: Sequence[Held], ends: Sequence[Sequence[Held]], of_both: np.ufunc) -> bool:
    """Whether bytes that launches write, always alike from one beginning, differ between the two beginnings.

    of_both: which are written, by those that are from either.
    """
    first, second = map(np.stack, ends)
    repeat = (first == first[0]).all(0) & (second == second[0]).all(0)
    written = of_both(first[0] != begins[0], second[0] != begins[1])
    return bool((repeat & written & (first[0] != second[0])).any())


CHECK = Statics()
