"""Results within tolerance at sizes that nobody was shown, wherever the contract takes them.

A contract that names its dimensions says that it serves every size. One with numbers in their place serves its own.
Of the sizes near its own that it takes, the two least divisible are tried, where vectors are an odd number, and the two
most divisible; on a CPU also multiples of a power of two, with nothing left over, and a few elements.
"""

from cuda_l2.machine._base import Fault
from cuda_l2.records import Task, VerdictStatus
from cuda_l2.tasks.values import Distribution
from cuda_l2.verify._base import Check, Session, TooMuchWorkspace, require_right


class Shapes(Check):
    name = "other shapes"
    order = 30

    def applies(self, session: Session) -> bool:
        return bool(tried(session))

    def run(self, session: Session) -> None:
        passed_over = [VerdictStatus.FORBIDDEN]
        if session.device == "cpu":  # where a slow kernel takes seconds then; a GPU's process ends by the limit
            passed_over.append(VerdictStatus.TIMED_OUT)
        for task in tried(session):
            try:
                _require_right_at(session, task)
            except Fault as fault:  # several times the size may need more shared memory than a block can have
                if fault.status not in passed_over or task not in session.cases.far:
                    raise
            except TooMuchWorkspace:  # and more scratch memory
                if task not in session.cases.far:
                    raise


def _require_right_at(session: Session, task: Task) -> None:
    cases = session.cases
    sizes = ", ".join(f"{name} {size}" for name, size in task.sizes)
    case = cases.drawn("shape", task=task)
    require_right(case, session.launch(case), f"at {sizes}, on {cases.usual}")
    if Distribution.WIDE in cases.distributions and task not in cases.far:
        case = cases.drawn("shape", Distribution.WIDE, task)
        require_right(case, session.launch(case), f"at {sizes}, on {Distribution.WIDE} values")


def tried(session: Session) -> list[Task]:
    """The task at other sizes that the contract takes, in the order in which they are tried."""
    near, far = (list(filter(session.serves, tasks)) for tasks in (session.cases.others, session.cases.far))
    few = near if session.device == "cpu" else [*near[:2], *near[-2:]]
    return [*dict.fromkeys([*few, *far])]


CHECK = Shapes()
