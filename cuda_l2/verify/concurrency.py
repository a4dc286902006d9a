"""What goes on around a GPU kernel must not change its result: a slow producer, other kernels, repeated launches."""

from cuda_l2.verify._base import Check, GpuSession, Session, normal_case, require_equal

LAUNCHES = 8


class Concurrency(Check):
    name = "concurrency"
    order = 60

    def applies(self, session: Session) -> bool:
        return isinstance(session, GpuSession)

    def run(self, session: Session) -> None:
        assert isinstance(session, GpuSession)
        old, case = (session.cases.get("concurrency", index, normal_case) for index in range(2))
        right = session.launch(case)
        beside = session.launch_beside_load(case, LAUNCHES)
        require_equal(beside, right, "gives another result when launched again and again beside other kernels")
        if session.programmatic:
            behind = session.launch_behind_producer(old, case)
            require_equal(
                behind, right, "reads A before the kernel that writes it is done: griddepcontrol.wait is missing"
            )


CHECK = Concurrency()
