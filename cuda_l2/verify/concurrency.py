"""What goes on around a GPU kernel must not change its result, nor it what goes on.

Other kernels beside it, repeated launches; where it is launched as a programmatic dependent, a slow kernel one, two and
three launches ahead that still writes an operand, all of it or a few elements, or still reads what an output held
before. Those between let the next one begin at once. An input that the contract declares constant is written only
before a launch that waits for it: the result must follow it all the same.
"""

from dataclasses import replace

import numpy as np
import torch

from cuda_l2.records import Tensor, VerdictStatus
from cuda_l2.tasks.cases import Case
from cuda_l2.verify._base import Check, CheckFailed, GpuSession, Outputs, Session, require_same

LAUNCHES = 8
BETWEEN = 0, 1, 2
"""Numbers of launches between the slow kernel and the candidate."""
FEW = 1 / 64, 1 / 4096
"""Shares of elements that come late: a look at some of those read early does not tell whether all are still right."""
AHEAD = "the kernel ahead", "a kernel two launches ahead", "a kernel three launches ahead"
MISSING = "griddepcontrol.wait is missing"


class Concurrency(Check):
    name = "concurrency"
    order = 60
    device = "cuda"

    def run(self, session: Session) -> None:
        assert isinstance(session, GpuSession)
        old, case = session.cases.drawn("state 0"), session.cases.drawn("state 1")
        right = session.launch(case)
        beside = session.launch_beside_load(case, LAUNCHES)
        require_same(beside, right, "gives another result when launched again and again beside other kernels")
        if session.programmatic:
            for late in case.task.tensors:
                if late.name in session.constant:
                    _require_following(session, old, case, late, right)
                    continue
                for between in BETWEEN:
                    _require_waiting(session, old, case, late, right, between)
                    if late in case.task.outputs:
                        _require_unwritten(session, case, late, right, between)
                if late not in case.task.outputs:
                    mixed = _with_few_of(old, case, late, session.cases.rng)
                    _require_waiting(session, mixed, case, late, right)


def _require_following(session: GpuSession, old: Case, case: Case, constant: Tensor, right: Outputs) -> None:
    """CheckFailed where a result does not follow a constant input that was written before an ordinary edge."""
    for between in BETWEEN:
        found = session.launch_behind_producer(old, case, constant, between + 1, ordinary=True)
        require_same(found, right, f"keeps {constant.name} of an earlier launch, which was written since")


def _require_waiting(
    session: GpuSession, old: Case, case: Case, late: Tensor, right: Outputs, between: int = 0
) -> None:
    """CheckFailed where a launch does not wait for the kernel that writes a tensor, which holds `old`'s until then."""
    does = "writes" if late in case.task.outputs else "reads"
    reason = f"{does} {late.name} while {AHEAD[between]} may still write it: {MISSING}"
    try:
        behind = session.launch_behind_producer(old, case, late, between)
    except CheckFailed as failure:
        raise CheckFailed(VerdictStatus.UNHYGIENIC, f"{reason} ({failure.reason})") from None
    require_same(behind, right, reason)


def _require_unwritten(session: GpuSession, case: Case, output: Tensor, right: Outputs, between: int) -> None:
    """CheckFailed where a launch does not wait for the kernel that reads what an output held before."""
    reason = f"writes {output.name} while {AHEAD[between]} may still read it: {MISSING}"
    try:
        found = session.launch_before_reader_ends(case, output, between)
    except CheckFailed as failure:
        raise CheckFailed(VerdictStatus.UNHYGIENIC, f"{reason} ({failure.reason})") from None
    require_same(found, right, reason)


def _with_few_of(old: Case, case: Case, tensor: Tensor, rng: np.random.Generator) -> Case:
    """The case with a few elements of a tensor from the old one, at random places."""
    values, others = case.tensors[tensor.name].clone(), old.tensors[tensor.name]
    generator = torch.Generator(values.device).manual_seed(int(rng.integers(1 << 62)))
    share = FEW[0] * (FEW[1] / FEW[0]) ** rng.random()
    few = torch.rand(values.shape, generator=generator, device=values.device) < share
    values[few] = others[few]
    return replace(case, tensors={**case.tensors, tensor.name: values})


CHECK = Concurrency()
