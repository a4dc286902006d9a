"""Repeats are bit-equal, and neither old answers nor right-looking outputs change what is computed.

What single launches must not touch (guards, inputs, unwritten elements) is watched on every launch by Session.launch.
"""

import itertools
from collections.abc import Iterator

import torch

from cuda_l2.machine.tensors import poisoned, words
from cuda_l2.records import VerdictStatus
from cuda_l2.tasks.cases import Case
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

REPEATS = 2
FEW = 1 / 64
"""Share of elements that are wrong where nearly all are right."""
REPEATED = "is not repeatable: the same launch gave another result"
LAST = "gives the last launch's answer, or part of it: it keeps state"
KEPT = "keeps state in its workspace"
HELD = "depends on what its outputs held before"
SKIPS = "skips work when its outputs look right already"
AS_BEFORE = {REPEATED: 0, LAST: 1 + REPEATS, KEPT: 0, HELD: 0, SKIPS: 0}
"""By what a wrong result shows: the number of the earlier launch whose result it must equal."""


class Hygiene(Check):
    name = "hygiene"
    order = 50

    def run(self, session: Session) -> None:
        session.as_timed()
        cases = session.cases
        case, other = cases.drawn("state 0"), cases.drawn("state 1")
        met = list[Outputs]()

        def wrong(turn: Turn[Case], found: Outputs) -> torch.Tensor:
            met.append(found if len(met) in AS_BEFORE.values() else {})
            if turn.what in AS_BEFORE:
                return differs(found, met[AS_BEFORE[turn.what]])
            return turn.case.wrong(found) if turn.what else torch.zeros((), dtype=torch.bool, device=cases.device)

        def require(turn: Turn[Case], found: Outputs) -> None:
            if turn.what in AS_BEFORE:
                require_same(found, met[AS_BEFORE[turn.what]], turn.what)
            else:
                require_right(turn.case, found, turn.what)

        repeats = [Turn(case, f"on {cases.usual}"), *[Turn(case, REPEATED)] * REPEATS]
        others = [Turn(other, "right after other inputs at the same place: it keeps state"), Turn(case)]
        kept = [Turn(other, LAST, keep=True), Turn(case, KEPT, keep=True)]
        require_each(session, [*repeats, *others, *kept], wrong, require)
        right, other_right = met[0], met[1 + REPEATS]
        # one step off: for who stores only what is further off than rounding
        beside_right = {name: (words(tensor) ^ 1).view(tensor.dtype) for name, tensor in right.items()}
        prefills = itertools.chain(
            [(HELD, other_right), (HELD, beside_right), (HELD, {n: torch.zeros_like(t) for n, t in right.items()})],
            ((SKIPS, part) for part in _right_in_part(session, right, other_right)),
        )
        try:
            require_each(session, (Turn(case, what, prefill) for what, prefill in prefills), wrong, require)
        except CheckFailed as failure:
            if failure.status is not VerdictStatus.INCORRECT:
                raise
            raise CheckFailed(VerdictStatus.UNHYGIENIC, f"{SKIPS} ({failure.reason})") from None


def _right_in_part(session: Session, right: Outputs, other: Outputs) -> Iterator[Outputs]:
    """Outputs some of whose elements are as they will be.

    Half at random beside those for other inputs, half at random beside poison, the first half beside zeros; all but a
    few, and all but one, beside those for other inputs, for who looks at one of each row, or at some.
    """
    poison = {output.name: poisoned(output, right[output.name].device) for output in session.task.outputs}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in right.items()}
    generator = torch.Generator(session.cases.device).manual_seed(int(session.cases.rng.integers(1 << 62)))

    def at_random(tensor: torch.Tensor) -> torch.Tensor:
        return torch.rand(tensor.shape, generator=generator, device=tensor.device) < 0.5

    def first(tensor: torch.Tensor) -> torch.Tensor:
        chosen = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
        chosen[: (tensor.numel() + 1) // 2] = True
        return chosen.reshape(tensor.shape)

    def but_few(tensor: torch.Tensor) -> torch.Tensor:
        return torch.rand(tensor.shape, generator=generator, device=tensor.device) >= FEW

    def but_one(tensor: torch.Tensor) -> torch.Tensor:
        chosen = torch.ones(tensor.numel(), dtype=torch.bool, device=tensor.device)
        at = torch.randint(max(1, tensor.numel()), (1,), generator=generator, device=tensor.device)
        chosen[at[: tensor.numel()]] = False
        return chosen.reshape(tensor.shape)

    for choose, beside in (
        (at_random, other),
        (at_random, poison),
        (first, zeros),
        (but_few, other),
        (but_one, other),
    ):
        yield {
            name: torch.where(choose(tensor), words(tensor), words(beside[name])).view(tensor.dtype)
            for name, tensor in right.items()
        }


CHECK = Hygiene()
