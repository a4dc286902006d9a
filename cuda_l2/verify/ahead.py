"""A launch reads its inputs when it is launched, not before.

Many launches stand in one table, all of which a candidate's process can read: one that computes several at once is
timed as no single launch ever runs. Here they are stopped on the way, and those that have not begun get other inputs.
They lie in every slot, or where a kernel is slow in some of them: no place may give other bits.
"""

from cuda_l2.records import VerdictStatus
from cuda_l2.verify._base import CheckFailed, require_same
from cuda_l2.verify._cpu_only import CpuCheck, CpuOnly

ROUNDS, TRIES = 1, 5
"""Rounds that came in time, and how many are tried for them."""


class Ahead(CpuCheck):
    name = "ahead"
    order = 57

    def run_on(self, session: CpuOnly) -> None:
        case, other = session.cases.drawn("state 0"), session.cases.drawn("state 1")
        right = {id(each): session.launch(each) for each in (case, other)}
        rounds = 0
        for _ in range(TRIES):
            found = list(session.launch_overtaken(case, other))
            for met, outputs in found:
                if met is other and other.violation(outputs) and not case.violation(outputs):
                    raise CheckFailed(VerdictStatus.UNHYGIENIC, "computes launches before they are made")
                require_same(outputs, right[id(met)], "gives another result in a row of launches")
            rounds += any(met is other for met, _ in found)  # not all were done before anybody looked
            if rounds == ROUNDS:
                return


CHECK = Ahead()
