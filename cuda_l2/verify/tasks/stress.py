"""Builds whose threads sleep at random where they meet give the same bits; verify/stress.py says more."""

from cuda_l2.machine.cpu.worker import Fault
from cuda_l2.verify._base import CheckFailed
from cuda_l2.verify.stress import RUNS, SEEDS
from cuda_l2.verify.tasks._base import GpuTaskSession, TaskCheck, TaskSession, require_same


class Stress(TaskCheck):
    name = "stress"
    order = 65  # before the sanitizer, whose start costs more
    full_only = True

    def applies(self, session: TaskSession) -> bool:
        return isinstance(session, GpuTaskSession)

    def run(self, session: TaskSession) -> None:
        assert isinstance(session, GpuTaskSession)
        case = session.cases.drawn("state 0")
        right = session.launch(case)
        try:
            for found in session.launch_stressed(case, SEEDS, RUNS):
                require_same(found, right, "the result changes when threads are delayed")
        except Fault as fault:
            raise CheckFailed(fault.status, f"when threads are delayed: {fault.reason}") from None


CHECK = Stress()
