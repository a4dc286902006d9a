"""No access outside the tensors, none to shared memory that nothing orders, no look at unwritten scratch.

That is compute-sanitizer's word, as for matrix products: verify/races.py says what it cannot see. It watches launches
at the task's own sizes where those are small, else at others that the contract takes.
"""

from cuda_l2.records import Operation
from cuda_l2.verify.races import look
from cuda_l2.verify.tasks._base import GpuTaskSession, TaskCheck, TaskSession

SMALL_BYTES, SMALL_FLOPS = 32 << 20, 1 << 34
"""Of a task that the tools watch in some seconds."""


class Races(TaskCheck):
    name = "races"
    order = 70
    full_only = True

    def applies(self, session: TaskSession) -> bool:
        return isinstance(session, GpuTaskSession) and session.sanitizes()

    def run(self, session: TaskSession) -> None:
        assert isinstance(session, GpuTaskSession)
        at = smaller(session)
        case = session.cases.drawn("races", task=at)
        look(session.plan_for(at), session.build, lambda tool: session.sanitize(tool, case), at, session.task)


def smaller(session: TaskSession) -> Operation:
    """The task itself unless it is large and the contract takes sizes that are not."""
    task = session.task
    small = task.bytes <= SMALL_BYTES and task.flops <= SMALL_FLOPS
    return task if small else next(filter(session.serves, session.cases.others), task)


CHECK = Races()
