"""Static variables that a launch writes depend on that launch alone: none counts, none remembers.

Equal launches are made behind different ones. What each of them changes must then hold the same; what it leaves alone
may hold anything. Where one launch behind another is not repeatable, threads take turns, and nothing is asked.
"""

import numpy as np

from cuda_l2.records import VerdictStatus
from cuda_l2.verify._base import CheckFailed, CpuCheck, CpuOnly

REPEATS, BEFORE = 4, 3


class Statics(CpuCheck):
    name = "statics"
    order = 58

    def run_on(self, session: CpuOnly) -> None:
        case, other = session.cases.drawn("state 0"), session.cases.drawn("state 1")
        session.launch(case)
        if not len(session.statics()):
            return
        begins, ends = [], []
        for _ in range(2):
            begins.append(session.statics())
            for _ in range(REPEATS):
                session.set_statics(begins[-1])
                session.launch(case, keep=True)
                ends.append(session.statics())
            for _ in range(BEFORE):
                session.launch(other, keep=True)
        first, second = np.stack(ends[:REPEATS]), np.stack(ends[REPEATS:])
        repeat = (first == first[0]).all(0) & (second == second[0]).all(0)
        written = (first[0] != begins[0]) | (second[0] != begins[1])
        if (repeat & written & (first[0] != second[0])).any():
            reason = "keeps state in static variables: what they hold after a launch depends on the launches before it"
            raise CheckFailed(VerdictStatus.UNHYGIENIC, reason)


CHECK = Statics()
