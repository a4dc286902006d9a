"""Results within the task's tolerance on other distributions than the file's own, wherever the reference is finite."""

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession
from cuda_l2.verify._base import require_right


class OtherValues(ModuleCheck):
    name = "other values"
    order = 20

    def run(self, session: ModuleSession) -> None:
        cases = session.cases
        found = [(values, cases.suitable("values", values, weights=11)) for values in cases.distributions]
        for index, (distribution, case) in enumerate((values, case) for values, case in found if case):
            if not index:
                session.make(case)
            require_right(case, session.launch(case)[0], f"on {distribution} values: {distribution.words}")


CHECK = OtherValues()
