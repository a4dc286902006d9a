"""Weights that change in place show in the next result: nothing made of them when the module was made is kept.

A module is trained and loaded this way. Weights that the candidate has under no name of the reference's cannot be set;
those come from the seed, and other seeds were tried before.
"""

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession
from cuda_l2.verify._base import require_right

MAX_TENSORS = 4


class Weights(ModuleCheck):
    name = "weights changed"
    order = 50

    def applies(self, session: ModuleSession) -> bool:
        return bool(session.cases.task.weights) and not session.own_weights

    def run(self, session: ModuleSession) -> None:
        cases = session.cases
        case, other = (cases.drawn("weights", weights=number) for number in (14, 15))
        session.make(case)
        if session.unnamed(case):
            return
        require_right(case, session.launch(case)[0], f"on {cases.usual}")
        require_right(other, session.launch(other)[0], "with all weights changed in place")
        for name in list(case.keys)[:MAX_TENSORS]:
            changed = cases.changed(case, name, wholly=False)
            if changed is None:  # no real numbers
                continue
            require_right(case, session.launch(case)[0], "with weights changed back in place")
            require_right(changed, session.launch(changed)[0], f"with one changed element of the weight {name}")


CHECK = Weights()
