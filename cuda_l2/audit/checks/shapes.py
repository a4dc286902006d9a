"""Results within tolerance at sizes nobody was shown, where the file's sizes may vary while the weights stay."""

from cuda_l2.audit._base import ModuleCheck, ModuleSession, require_right

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
    """Odd sizes, all larger or all smaller than those shown; equal ones stay equal, for they may go together."""
    cases = session.cases
    sizes = dict(cases.sizes)
    for name, value in cases.examined.sizes:
        if name in cases.examined.variable:
            sizes[name] = max(1, round(value * cases.factor(index, value)) // 2 * 2 + 1)
    return sizes


CHECK = OtherShapes()
