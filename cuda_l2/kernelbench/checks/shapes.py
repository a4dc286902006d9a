"""Results within tolerance at sizes nobody was shown, where the file's sizes may vary while the weights stay."""

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession, require_right
from cuda_l2.kernelbench.cases import other_sizes

TRIES = 2


class OtherShapes(ModuleCheck):
    name = "other shapes"
    order = 30

    def applies(self, session: ModuleSession) -> bool:
        return bool(session.cases.examined.variable) and not session.one_shape

    def run(self, session: ModuleSession) -> None:
        for index in range(TRIES):
            case = session.cases.find(f"shape {index}", sizes=_others(session, index), weights_seed=12)
            if case is None:  # sizes that go together
                continue
            session.make(case, 12)
            sizes = ", ".join(f"{name} {size}" for name, size in case.task.sizes)
            require_right(case, session.launch(case)[0], f"at {sizes}")


def _others(session: ModuleSession, index: int) -> dict[str, int]:
    """All larger or all smaller than those shown."""
    cases = session.cases
    return dict(cases.sizes) | other_sizes(cases.examined, lambda value: cases.factor(index, value))


CHECK = OtherShapes()
