"""What goes on around a GPU kernel must not change its result: a slow producer, other kernels, repeated launches."""

import torch

from cuda_l2.records import VerdictStatus
from cuda_l2.verify._base import Case, Cases, Check, CheckFailed, GpuSession, Session, first_difference, operands

LAUNCHES = 8


class Concurrency(Check):
    name = "concurrency"
    order = 60

    def applies(self, session: Session) -> bool:
        return isinstance(session, GpuSession)

    def run(self, session: Session) -> None:
        assert isinstance(session, GpuSession)
        old, case = (session.cases.get("concurrency", index, _make) for index in range(2))
        right = session.launch(case)
        beside = session.launch_beside_load(case, LAUNCHES)
        _require_equal(beside, right, "gives another result when launched again and again beside other kernels")
        if session.programmatic:
            behind = session.launch_behind_producer(old, case)
            _require_equal(
                behind, right, "reads A before the kernel that writes it is done: griddepcontrol.wait is missing"
            )


def _require_equal(found: torch.Tensor, right: torch.Tensor, reason: str) -> None:
    wrong = found.view(torch.int16) != right.view(torch.int16)
    if wrong.any():
        raise CheckFailed(VerdictStatus.UNHYGIENIC, reason, first_difference(found, right, wrong))


def _make(cases: Cases, generator: torch.Generator) -> Case:
    return operands(cases.gemm, *cases.normal(generator))


CHECK = Concurrency()
