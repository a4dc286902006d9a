"""Weights that change in place show in the next result: nothing made of them when the module was made is kept.

A module is trained and loaded this way. Weights that the candidate has under no name of the reference's cannot be set;
those come from the seed, and other seeds were tried before.
"""

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession, require_right

MAX_TENSORS = 4


class Weights(ModuleCheck):
    name = "weights changed"
    order = 50

    def applies(self, session: ModuleSession) -> bool:
        return bool(session.cases.get("seed 0", weights_seed=0).keys) and not session.own_weights

    def run(self, session: ModuleSession) -> None:
        cases = session.cases
        case, other = (cases.get("weights", weights_seed=seed) for seed in (14, 15))
        session.make(case, 14)
        if session.unnamed(case):
            return
        require_right(case, session.launch(case)[0], "on the file's own inputs")
        require_right(other, session.launch(other)[0], "with all weights changed in place")
        for name in list(case.keys)[:MAX_TENSORS]:
            changed = cases.find("weights", weights_seed=14, changed=name)
            if changed is None:  # no real numbers
                continue
            require_right(case, session.launch(case)[0], "with weights changed back in place")
            require_right(changed, session.launch(changed)[0], f"with one changed element of the weight {name}")


CHECK = Weights()
