"""Static variables that a launch writes depend on that launch alone: none counts, none remembers.

Equal launches are made behind different ones. What each of them changes must then hold the same; what it leaves alone
may hold anything. Where one launch behind another is not repeatable, threads take turns, and nothing is asked.
"""

import numpy as np

from cuda_l2.records import VerdictStatus
from cuda_l2.tasks.cases import Case
from cuda_l2.verify._base import CheckFailed, CpuCheck, CpuOnly

REPEATS, BEFORE, TIMES = 4, 3, 3


class Statics(CpuCheck):
    name = "statics"
    order = 58

    def run_on(self, session: CpuOnly) -> None:
        case, other = session.cases.drawn("state 0"), session.cases.drawn("state 1")
        session.launch(case)
        # threads that take turns may do so alike for a while, and otherwise afterwards: once is no proof
        if len(session.statics()) and all(self._remembers(session, case, other) for _ in range(TIMES)):
            reason = "keeps state in static variables: what they hold after a launch depends on the launches before it"
            raise CheckFailed(VerdictStatus.UNHYGIENIC, reason)

    @staticmethod
    def _remembers(session: CpuOnly, case: Case, other: Case) -> bool:
        """Whether what equal launches change differs by the launches before them."""
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
        return bool((repeat & written & (first[0] != second[0])).any())


CHECK = Statics()
