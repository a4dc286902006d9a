"""Results within the task's tolerance on other distributions than the file's own, wherever the reference is finite."""

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession, require_right


class OtherValues(ModuleCheck):
    name = "other values"
    order = 20

    def run(self, session: ModuleSession) -> None:
        made = False
        for distribution in session.cases.examined.distributions:
            case = session.cases.find("values", distribution=distribution, weights_seed=11)
            if case is None:
                continue
            if not made:
                session.make(case, 11)
                made = True
            require_right(case, session.launch(case)[0], f"on {distribution} values")


CHECK = OtherValues()
