"""What goes on around a GPU kernel must not change its result: a slow producer, other kernels, repeated launches."""

from cuda_l2.records import VerdictStatus
from cuda_l2.verify._base import Check, CheckFailed, GpuSession, Session, require_same

LAUNCHES = 8


class Concurrency(Check):
    name = "concurrency"
    order = 60
    device = "cuda"

    def run(self, session: Session) -> None:
        assert isinstance(session, GpuSession)
        old, case = session.cases.drawn("state 0"), session.cases.drawn("state 1")
        right = session.launch(case)
        beside = session.launch_beside_load(case, LAUNCHES)
        require_same(beside, right, "gives another result when launched again and again beside other kernels")
        for late in case.task.tensors if session.programmatic else ():
            does = "writes" if late in case.task.outputs else "reads"
            reason = f"{does} {late.name} while the kernel ahead may still write it: griddepcontrol.wait is missing"
            try:
                behind = session.launch_behind_producer(old, case, late)
            except CheckFailed as failure:
                raise CheckFailed(VerdictStatus.UNHYGIENIC, f"{reason} ({failure.reason})") from None
            require_same(behind, right, reason)


CHECK = Concurrency()
