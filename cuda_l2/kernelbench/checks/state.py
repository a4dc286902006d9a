"""State: repeats are right, new inputs at the old place get new answers, and answers stay as others are given."""

import torch

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession
from cuda_l2.machine.tensors import words
from cuda_l2.verify._base import require_right

MAX_TENSORS = 4


class State(ModuleCheck):
    name = "state"
    order = 40

    def run(self, session: ModuleSession) -> None:
        cases = session.cases
        case, other = (cases.drawn(name, weights=13) for name in ("state 0", "state 1"))
        session.make(case)
        right = session.launch(case)[0]
        require_right(case, right, f"on {cases.usual}")
        if not cases.moves_buffers:
            again = session.launch(case, load=False)[0]
            require_right(case, again, "of the same call again")
            if not all(torch.equal(words(again[name]), words(right[name])) for name in right):
                session.note("is not repeatable bit for bit")
        require_right(other, session.launch(other)[0], "right after other inputs at the same place: it keeps state")
        both = session.launch(case, other, case)
        for each, found in zip((case, other, case), both, strict=True):
            require_right(each, found, "of several calls whose results are read after the last")
        given = [(tensor, case.tensors[tensor.name]) for tensor in case.task.inputs if tensor.name not in case.numbers]
        real = [tensor for tensor, values in given if values.dtype.is_floating_point and values.numel()]
        for tensor in real[:MAX_TENSORS]:
            for wholly in (False, True):
                changed = cases.changed(case, tensor.name, wholly=wholly)
                if changed is None:
                    continue
                session.launch(case)  # what a cache would keep
                what = "another" if wholly else "one changed element of"
                require_right(changed, session.launch(changed)[0], f"with {what} {tensor.name}")


CHECK = State()
