"""Static variables and the stack hold what the launch that wrote them put there: none counts, none remembers.

Equal launches are made behind different ones. What each of them changes must then hold the same; what it leaves alone
may hold anything. Where one launch behind another is not repeatable, threads take turns, and nothing is asked.
"""

import numpy as np
import numpy.typing as npt

from cuda_l2.records import VerdictStatus
from cuda_l2.verify._base import CheckFailed, CpuCheck, CpuOnly

REPEATS, BEFORE = 3, 2
MORE = 16
"""Further launches from either beginning where these show a difference: threads that take turns may do so alike for a
while, and otherwise afterwards."""

Held = npt.NDArray[np.uint8]


class Statics(CpuCheck):
    name = "statics"
    order = 58

    def run_on(self, session: CpuOnly) -> None:
        case, other = session.cases.drawn("state 0"), session.cases.drawn("state 1")
        session.launch(case)
        if not len(session.statics()):
            return

        def ends(start: Held, count: int) -> list[Held]:
            """What the variables hold after each of `count` equal launches from one beginning."""
            found = []
            for _ in range(count):
                session.set_statics(start)
                session.launch(case, keep=True)
                found.append(session.statics())
            return found

        begins, found = list[Held](), list[list[Held]]()
        for before in (0, BEFORE):
            for _ in range(before):
                session.launch(other, keep=True)
            begins.append(session.statics())
            found.append(ends(begins[-1], REPEATS))
        if _differ(begins, found):
            found = [before + ends(start, MORE) for start, before in zip(begins, found, strict=True)]
        if _differ(begins, found):
            reason = (
                "keeps state in static variables or on the stack: what they hold after a launch depends on the launches"
                " before it"
            )
            raise CheckFailed(VerdictStatus.UNHYGIENIC, reason)


def _differ(begins: list[Held], ends: list[list[Held]]) -> bool:
    """Whether bytes that launches write, always alike from one beginning, differ between the two beginnings."""
    first, second = map(np.stack, ends)
    repeat = (first == first[0]).all(0) & (second == second[0]).all(0)
    written = (first[0] != begins[0]) | (second[0] != begins[1])
    return bool((repeat & written & (first[0] != second[0])).any())


CHECK = Statics()
