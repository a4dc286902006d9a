"""Repeats are bit-equal, and neither old answers nor right-looking outputs change what is computed.

What single launches must not touch (guards, inputs, unwritten elements) is watched on every launch by Session.launch.
"""

import itertools
from collections.abc import Iterator

import torch

from cuda_l2.machine.tensors import poisoned, words
from cuda_l2.records import VerdictStatus
from cuda_l2.verify._base import Check, CheckFailed, Outputs, Session, Turn, require_right, require_same

REPEATS = 2
FEW = 1 / 64
"""Share of elements that are wrong where nearly all are right."""


class Hygiene(Check):
    name = "hygiene"
    order = 50

    def run(self, session: Session) -> None:
        session.as_timed()
        cases = session.cases
        case, other = cases.drawn("state 0"), cases.drawn("state 1")
        repeats = [Turn(case)] * (1 + REPEATS)
        kept = [Turn(case), Turn(other, keep=True), Turn(case, keep=True)]
        launches = (found for _, found in session.launch_each([*repeats, Turn(other), *kept]))
        right = next(launches)
        require_right(case, right, f"on {cases.usual}")
        for _ in range(REPEATS):
            require_same(next(launches), right, "is not repeatable: the same launch gave another result")
        other_right = next(launches)
        require_right(other, other_right, "right after other inputs at the same place: it keeps state")
        next(launches)
        reason = "gives the last launch's answer, or part of it: it keeps state"
        require_same(next(launches), other_right, reason)
        require_same(next(launches), right, "keeps state in its workspace")
        prefills = itertools.chain([other_right], _right_in_part(session, right, other_right))
        launches = (found for _, found in session.launch_each(Turn(case, prefill=prefill) for prefill in prefills))
        require_same(next(launches), right, "depends on what its outputs held before")
        reason = "skips work when its outputs look right already"
        try:
            for found in launches:
                require_same(found, right, reason)
        except CheckFailed as failure:
            if failure.status is not VerdictStatus.INCORRECT:
                raise
            raise CheckFailed(VerdictStatus.UNHYGIENIC, f"{reason} ({failure.reason})") from None


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
