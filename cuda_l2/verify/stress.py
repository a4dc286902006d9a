"""Builds of the same source whose threads sleep at random where they meet give the same bits.

Each launch finds poisoned outputs and scratch and garbage in shared memory. They run beside load, with half of the
multiprocessors, and at times caches and memory too, taken now and then; other blocks fill shared memory with garbage
wherever one of theirs has left it.
"""

import torch

from cuda_l2.machine.cpu.worker import Fault
from cuda_l2.records import VerdictStatus
from cuda_l2.verify._base import Check, CheckFailed, GpuSession, Session, first_difference, normal_case

SEEDS = (1, 2, 3, 4)
RUNS = 100
"""Of each seed's build."""


class Stress(Check):
    name = "stress"
    order = 65  # before the sanitizer, whose start costs more
    full_only = True

    def applies(self, session: Session) -> bool:
        return isinstance(session, GpuSession)

    def run(self, session: Session) -> None:
        assert isinstance(session, GpuSession)
        case = session.cases.get("stress", 0, normal_case)
        right = session.launch(case)
        try:
            for outputs in session.launch_stressed(case, SEEDS, RUNS):
                wrong = outputs.view(torch.int16) != right.view(torch.int16)
                differ = wrong.flatten(1).any(1)
                if differ.any():
                    first = int(differ.nonzero()[0])
                    share = f"in {int(differ.sum())} of {len(outputs)} launches"
                    element = first_difference(outputs[first], right, wrong[first])
                    reason = f"the result changes when threads are delayed, {share}: {element}"
                    raise CheckFailed(VerdictStatus.UNHYGIENIC, reason, element)
        except Fault as fault:
            raise CheckFailed(fault.status, f"when threads are delayed: {fault.reason}") from None


CHECK = Stress()
