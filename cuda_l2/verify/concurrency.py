"""What goes on around a GPU kernel must not change its result: a slow producer, other kernels, repeated launches."""

from cuda_l2.verify._base import Check, GpuSession, Session, require_same

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
        if session.programmatic:
            behind = session.launch_behind_producer(old, case)
            late = session.cases.late.name
            reason = f"reads {late} before the kernel that writes it is done: griddepcontrol.wait is missing"
            require_same(behind, right, reason)


CHECK = Concurrency()
