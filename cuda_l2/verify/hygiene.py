"""State: repeats are bit-equal, and neither old answers nor right-looking outputs change what is computed.

What single launches must not touch (guards, inputs, unwritten elements) is watched on every launch by
Session.launch.
"""

import torch

from cuda_l2.execute.arena import POISON
from cuda_l2.records import Gemm, VerdictStatus
from cuda_l2.verify._base import Case, Check, CheckFailed, Session, first_difference, operands

REPEATS = 3


class Hygiene(Check):
    name = "hygiene"
    order = 50

    def run(self, session: Session) -> None:
        case, other = (session.cases.get("hygiene", index, _make) for index in range(2))
        right = session.launch(case)
        for _ in range(REPEATS):
            _require_equal(session.launch(case), right, "is not repeatable: the same launch gave another result")
        other_right = session.launch(other)
        # as if the last answer, or most of this one, were there already
        _require_equal(session.launch(case, prefill=other_right), right, "depends on what C held before")
        partly = right.clone()
        partly.view(torch.int16)[torch.rand(right.shape) < 0.5] = POISON
        _require_equal(session.launch(case, prefill=partly), right, "skips work when C looks right already")
        corner = torch.full_like(right, 0).view(torch.int16).fill_(POISON).view(torch.float16)
        corner[: (right.shape[0] + 1) // 2] = right[: (right.shape[0] + 1) // 2]
        _require_equal(session.launch(case, prefill=corner), right, "skips work when C looks right already")


def _require_equal(found: torch.Tensor, right: torch.Tensor, reason: str) -> None:
    wrong = found.view(torch.int16) != right.view(torch.int16)
    if wrong.any():
        raise CheckFailed(VerdictStatus.UNHYGIENIC, reason, first_difference(found, right, wrong))


def _make(gemm: Gemm, generator: torch.Generator) -> Case:
    return operands(
        gemm,
        torch.randn(gemm.m, gemm.k, generator=generator),
        torch.randn(gemm.k, gemm.n, generator=generator),
    )


CHECK = Hygiene()
