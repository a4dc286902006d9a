"""What goes on around a GPU kernel must not change its result: a slow producer, other kernels, repeated launches."""

from cuda_l2.verify.concurrency import LAUNCHES
from cuda_l2.verify.tasks._base import GpuTaskSession, TaskCheck, TaskSession, require_same


class Concurrency(TaskCheck):
    name = "concurrency"
    order = 60

    def applies(self, session: TaskSession) -> bool:
        return isinstance(session, GpuTaskSession)

    def run(self, session: TaskSession) -> None:
        assert isinstance(session, GpuTaskSession)
        old, case = session.cases.drawn("state 0"), session.cases.drawn("state 1")
        right = session.launch(case)
        beside = session.launch_beside_load(case, LAUNCHES)
        require_same(beside, right, "gives another result when launched again and again beside other kernels")
        if session.programmatic:
            behind = session.launch_behind_producer(old, case)
            reason = "reads an input before the kernel that writes it is done: griddepcontrol.wait is missing"
            require_same(behind, right, reason)


CHECK = Concurrency()
