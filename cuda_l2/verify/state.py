"""Every change of a tensor shows: what was made of inputs or weights in one launch may not serve the next.

Weights stay from call to call where a kernel is used, but what was made of them may not be kept either: nothing tells a
kernel that they changed. One changed element would escape a fingerprint of a tensor, and two that are exchanged a sum
over all of it.
"""

from collections.abc import Iterator

import torch

from cuda_l2.machine.tensors import words
from cuda_l2.records import VerdictStatus
from cuda_l2.tasks.cases import Case, Cases
from cuda_l2.verify._base import (
    Check,
    CheckFailed,
    Outputs,
    Session,
    Turn,
    differs,
    require_each,
    require_right,
    require_same,
)

MAX_TENSORS = 6
"""Tensors that are changed; drawn at random where a task has more."""


class State(Check):
    name = "state"
    order = 55

    def run(self, session: Session) -> None:
        session.as_timed()
        cases = session.cases
        case = cases.drawn("state 0")
        right: dict[str, torch.Tensor] = {}

        def wrong(turn: Turn[Case], found: Outputs) -> torch.Tensor:
            right.update(right or found)  # the first launch's
            if not turn.what:
                return torch.zeros((), dtype=torch.bool, device=cases.device)
            beyond = differs(_mended(turn.case, found, right), right) if turn.case.alters else None
            within = turn.case.wrong(found).any()
            return within if beyond is None else within | beyond

        def require(turn: Turn[Case], found: Outputs) -> None:
            _require_noticed(session, turn.case, found, right, turn.what)

        require_each(session, _turns(cases, case), wrong, require)


def _turns(cases: Cases, case: Case) -> Iterator[Turn[Case]]:
    """The case, and for each tensor again, which a cache would keep, before those in which it is another."""
    names = [tensor.name for tensor in case.task.given]
    yield Turn(case)
    for index in cases.rng.permutation(len(names))[:MAX_TENSORS]:
        yield Turn(case, keep=True)
        for wholly in (*[False] * cases.element_changes, True):
            changed = cases.changed(case, names[int(index)], wholly=wholly)
            if changed is not None:
                what = "another" if wholly else "one changed element of"
                yield Turn(changed, f"{what} {names[int(index)]}", keep=True)
        exchanged = cases.exchanged(case, names[int(index)])
        if exchanged is not None:
            yield Turn(case, keep=True)
            yield Turn(exchanged, f"two exchanged elements of {names[int(index)]}", keep=True)


def _require_noticed(session: Session, changed: Case, found: Outputs, right: Outputs, what: str) -> None:
    """CheckFailed where a launch on the changed case gives other results than the case's.

    right: outputs before the change.
    """
    if changed.violation(found):
        changed = session.cases.exactly(changed)
        if changed.violation(found) and all(bool((words(found[n]) == words(right[n])).all()) for n in right):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, f"does not notice {what}: it keeps state")
    require_right(changed, found, f"with {what}")
    if changed.alters:
        require_same(_mended(changed, found, right), right, f"{what} changes other parts of the result")


def _mended(changed: Case, found: Outputs, right: Outputs) -> Outputs:
    """The outputs with those before the change where it alters them."""
    mended = {name: tensor.clone() for name, tensor in found.items()}
    for name, at in changed.alters.items():
        mended[name][at] = right[name][at]
    return mended


CHECK = State()
