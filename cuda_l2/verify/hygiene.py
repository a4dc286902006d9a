"""State: repeats are bit-equal, and neither old answers nor right-looking outputs change what is computed.

What single launches must not touch (guards, inputs, unwritten elements) is watched on every launch by
Session.launch.
"""

import torch

from cuda_l2.machine.fills import POISON
from cuda_l2.records import VerdictStatus
from cuda_l2.verify._base import Case, Check, CheckFailed, Session, logical_b, normal_case, require_equal

REPEATS = 2
ONE_ELEMENT_CHANGES = 2


class Hygiene(Check):
    name = "hygiene"
    order = 50

    def run(self, session: Session) -> None:
        session.as_timed()
        case, other = (session.cases.get("hygiene", index, normal_case) for index in range(2))
        right = session.launch(case)
        for _ in range(REPEATS):
            require_equal(session.launch(case), right, "is not repeatable: the same launch gave another result")
        other_right = session.launch(other)
        session.launch(case)
        require_equal(
            session.launch(other, keep=True),
            other_right,
            "gives the last launch's answer, or part of it: it keeps state",
        )
        require_equal(session.launch(case, keep=True), right, "keeps state in its workspace")
        # as if the last answer, or most of this one, were there already
        require_equal(session.launch(case, prefill=other_right), right, "depends on what C held before")
        partly = right.clone()
        chosen = torch.rand(right.shape, generator=session.cases.generator, device=right.device) < 0.5
        partly.view(torch.int16)[chosen] = POISON
        require_equal(session.launch(case, prefill=partly), right, "skips work when C looks right already")
        corner = torch.full_like(right, 0).view(torch.int16).fill_(POISON).view(torch.float16)
        corner[: (right.shape[0] + 1) // 2] = right[: (right.shape[0] + 1) // 2]
        require_equal(session.launch(case, prefill=corner), right, "skips work when C looks right already")
        session.launch(case)  # what a cache would keep
        for _ in range(ONE_ELEMENT_CHANGES):
            _require_noticed(session, case, right, "a")
            _require_noticed(session, case, right, "b")


def _require_noticed(session: Session, case: Case, right: torch.Tensor, operand: str) -> None:
    """One changed element changes its row or column of C and nothing else: a fingerprint of inputs would miss it."""
    gemm = session.gemm
    p, row, column = (int(session.cases.rng.integers(size)) for size in (gemm.k, gemm.m, gemm.n))
    at: tuple[int | slice, int | slice]
    if operand == "a":
        at, changed = (row, slice(None)), Case(case.a.clone(), case.b)
        element = changed.a[row, p]
    else:
        at, changed = (slice(None), column), Case(case.a, case.b.clone())
        element = logical_b(gemm, changed)[p, column]
    element.mul_(-2).add_(4)
    found = session.launch(changed, keep=True)
    b = logical_b(gemm, changed)
    expected = changed.a[row].float() @ b.float() if operand == "a" else changed.a.float() @ b[:, column].float()
    close = (found[at].float() - expected).abs() <= 0.02 * gemm.k**0.5 + 0.01 * expected.abs()
    mended = found.clone()
    mended[at] = right[at]
    all_close, others_equal = torch.stack(
        [close.all(), (mended.view(torch.int16) == right.view(torch.int16)).all()]
    ).tolist()
    if not all_close:
        name = operand.upper()
        raise CheckFailed(VerdictStatus.UNHYGIENIC, f"does not notice one changed element of {name}: it keeps state")
    if not others_equal:
        require_equal(mended, right, f"one changed element of {operand.upper()} changes other parts of C")


CHECK = Hygiene()
