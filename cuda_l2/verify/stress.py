"""Builds of the same source whose threads sleep at random where they meet give the same bits.

Each launch finds poisoned outputs and scratch and garbage in shared memory. They run beside load, with half of the
multiprocessors, and at times caches and memory too, taken now and then; other blocks fill shared memory with garbage
wherever one of theirs has left it.
"""

from cuda_l2.machine._base import Fault
from cuda_l2.verify._base import Check, CheckFailed, GpuSession, Session, require_same

SEEDS = (1, 2, 3, 4)
RUNS = 100
"""Launches of each seed's build."""


class Stress(Check):
    name = "stress"
    order = 65  # before the sanitizer, whose start costs more
    full_only = True
    device = "cuda"

    def run(self, session: Session) -> None:
        assert isinstance(session, GpuSession)
        case = session.cases.drawn("state 0")
        right = session.launch(case)
        try:
            for found in session.launch_stressed(case, SEEDS, RUNS):
                require_same(found, right, "the result changes when threads are delayed")
        except Fault as fault:
            raise CheckFailed(fault.status, f"when threads are delayed: {fault.reason}") from None


CHECK = Stress()
