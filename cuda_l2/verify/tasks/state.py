"""State: repeats are bit-equal, old answers and right-looking outputs change nothing, every change of a tensor shows.

Weights stay from call to call where a kernel is used, but what was made of them may not be kept either: nothing tells a
kernel that they changed.
"""

import torch

from cuda_l2.verify.tasks._base import Outputs, TaskCheck, TaskSession, require_right, require_same

REPEATS = 2
MAX_TENSORS = 6
"""Of a task with more, so many drawn at random are changed."""


class State(TaskCheck):
    name = "state"
    order = 50

    def run(self, session: TaskSession) -> None:
        session.as_timed()
        cases = session.cases
        case, other = cases.drawn("state 0"), cases.drawn("state 1")
        right = session.launch(case)
        require_right(case, right, f"on {cases.usual}")
        for _ in range(REPEATS):
            require_same(session.launch(case), right, "is not repeatable: the same launch gave another result")
        other_right = session.launch(other)
        require_right(other, other_right, "right after other inputs at the same place: it keeps state")
        session.launch(case)
        require_same(session.launch(other, keep=True), other_right, "gives the last launch's answer: it keeps state")
        require_same(session.launch(case, keep=True), right, "keeps state in its workspace")
        require_same(session.launch(case, prefill=other_right), right, "depends on what its outputs held before")
        partly = _partly(session, right, other_right)
        require_same(session.launch(case, prefill=partly), right, "skips work when its outputs look right already")
        names = [tensor.name for tensor in (*case.task.inputs, *case.task.weights)]
        for index in cases.rng.permutation(len(names))[:MAX_TENSORS]:
            for wholly in (False, True):
                changed = cases.changed(case, names[int(index)], wholly=wholly)
                if changed is None:
                    continue
                what = "another" if wholly else "one changed element of"
                session.launch(case, keep=True)  # what a cache would keep
                found = session.launch(changed, keep=True)
                if changed.violation(found):
                    changed = cases.exactly(changed)
                require_right(changed, found, f"with {what} {names[int(index)]}")


def _partly(session: TaskSession, right: Outputs, other: Outputs) -> Outputs:
    """Half of the elements, at random, as they will be; the others as they were for other inputs."""
    mixed = {}
    for name, tensor in right.items():
        generator = torch.Generator(tensor.device).manual_seed(int(session.cases.rng.integers(1 << 62)))
        chosen = torch.rand(tensor.shape, generator=generator, device=tensor.device) < 0.5
        mixed[name] = torch.where(chosen, tensor, other[name])
    return mixed


CHECK = State()
