"""Results within the task's tolerance on every other distribution of values, so that none was learnt by heart."""

from cuda_l2.verify._base import Check, Session, require_right


class Distributions(Check):
    name = "other values"
    order = 20
    products = False  # its own checks draw integers, ones and special values

    def run(self, session: Session) -> None:
        for distribution in session.cases.distributions:
            case = session.cases.drawn("values", distribution)
            require_right(case, session.launch(case), f"on {distribution} values: {distribution.words}")


CHECK = Distributions()
