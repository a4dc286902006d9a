"""Results within tolerance at sizes that nobody was shown, wherever the contract takes them.

A contract that names its dimensions says that it serves every size. One with numbers in their place serves its own.
"""

from cuda_l2.tasks.values import Distribution
from cuda_l2.verify._base import Check, Session, require_right


class Shapes(Check):
    name = "other shapes"
    order = 30

    def applies(self, session: Session) -> bool:
        return any(session.serves(task) for task in session.cases.others)

    def run(self, session: Session) -> None:
        cases = session.cases
        for task in filter(session.serves, cases.others):
            sizes = ", ".join(f"{name} {size}" for name, size in task.sizes)
            case = cases.drawn("shape", task=task)
            require_right(case, session.launch(case), f"at {sizes}, on {cases.usual}")
            if Distribution.WIDE in cases.distributions:
                case = cases.drawn("shape", Distribution.WIDE, task)
                require_right(case, session.launch(case), f"at {sizes}, on {Distribution.WIDE} values")


CHECK = Shapes()
