"""Results within tolerance at sizes nobody was shown, where the file's sizes may vary while the weights stay."""

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession
from cuda_l2.verify._base import require_right


class OtherShapes(ModuleCheck):
    name = "other shapes"
    order = 30

    def applies(self, session: ModuleSession) -> bool:
        return bool(session.cases.others) and not session.one_shape

    def run(self, session: ModuleSession) -> None:
        for task in session.cases.others:
            case = session.cases.drawn("shape", task=task, weights=12)
            session.make(case)
            sizes = ", ".join(f"{name} {size}" for name, size in task.sizes)
            require_right(case, session.launch(case)[0], f"at {sizes}")


CHECK = OtherShapes()
