"""Results within the task's tolerance on every other distribution of values, so that none was learnt by heart."""

from cuda_l2.verify.tasks._base import TaskCheck, TaskSession, require_right


class Distributions(TaskCheck):
    name = "other values"
    order = 20

    def run(self, session: TaskSession) -> None:
        for distribution in session.cases.distributions:
            case = session.cases.drawn("values", distribution)
            require_right(case, session.launch(case), f"on {distribution} values")


CHECK = Distributions()
