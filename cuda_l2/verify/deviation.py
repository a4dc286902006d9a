"""Baseline-bounded deviation (paper section 2.3), reported as printed and gated in a form baselines themselves pass.

Printed: the candidate's largest deviation may not exceed the largest difference among baselines; but baselines
often agree bit for bit, and then every other summation order fails. Gated: against fp64, the root mean square
error is at most 1.25 times the worst baseline's (2 times in the fp16 class), and the largest error at most the
worst baseline's plus one step of C's type, over five inputs.
"""

import torch

from cuda_l2.records import Accumulate, VerdictStatus
from cuda_l2.system.errors import MachineError
from cuda_l2.tasks.products import ProductCase, ProductCases, require_finite
from cuda_l2.tasks.tolerances import SUMMATION_NOISE
from cuda_l2.verify._base import CheckFailed, ProductCheck, Session, Turn

INPUTS = 5
RMS_FACTOR = {Accumulate.FP32: 1.25, Accumulate.FP16: 2.0}
UNRELATED, FP16_SUM = 0.25, 2.0**-12
"""A baseline further off than the first, or the second times the square root of K, of what C's elements have for their
RMS, sqrt(K), computed something else, or the fp64 product is another's; a bound from it would hold for anything. The
second is more than sums kept in fp16 lose."""
FP16_ROWS = 32
"""Rows compared in the fp16 class on the CPU, whose baseline is an emulated fp16 sum."""


class BaselineDeviation(ProductCheck):
    name = "baseline-bounded deviation"
    order = 35

    def run_on(self, session: Session, cases: ProductCases) -> None:
        factor, slack = RMS_FACTOR[cases.task.accumulate], SUMMATION_NOISE * cases.task.k**0.5
        worst_rms = worst_max = allowed = deviation = 0.0
        for turn, found in session.launch_each(Turn(cases.get("normal", index, _make)) for index in range(INPUTS)):
            case = turn.case
            rows, exact = case.expected["rows"], case.expected["fp64"]
            error = found["c"][rows].double() - exact
            rms, largest = torch.stack([error.square().mean().sqrt(), error.abs().max()]).tolist()
            rms_allowed = factor * float(case.expected["rms"]) + slack
            max_allowed = float(case.expected["max"]) + float(case.expected["step"]) + slack
            worst_rms, worst_max = max(worst_rms, rms), max(worst_max, largest)
            allowed = max(allowed, max_allowed)
            deviation = max(deviation, float(case.expected["spread"]))
            if not rms <= rms_allowed:
                raise CheckFailed(
                    VerdictStatus.IMPRECISE, f"RMS error {rms:.3g} against fp64; the baselines allow {rms_allowed:.3g}"
                )
            if not largest <= max_allowed:
                raise CheckFailed(
                    VerdictStatus.IMPRECISE,
                    f"largest error {largest:.3g} against fp64; the baselines allow {max_allowed:.3g}",
                )
        session.rms_error, session.max_error, session.baseline_deviation = worst_rms, worst_max, deviation
        session.max_allowed = allowed


def step(magnitude: float, dtype: torch.dtype) -> float:
    """The distance between numbers of a type at a magnitude."""
    limits = torch.finfo(dtype)
    value = torch.tensor(min(magnitude, limits.max), dtype=dtype)
    below = torch.nextafter(value, torch.tensor(0.0, dtype=dtype))
    return max(float(value) - float(below), limits.smallest_normal * limits.eps)


def _make(cases: ProductCases, generator: torch.Generator) -> ProductCase:
    gemm, references = cases.task, cases.references
    case = cases.operands(*cases.normal(generator))
    compared = max(1, int(gemm.m * min(1.0, references.exact_flops / gemm.flops)))
    if gemm.accumulate is Accumulate.FP16 and cases.device.type == "cpu":
        compared = min(compared, FP16_ROWS)
    rows = torch.randperm(gemm.m, generator=generator, device=cases.device)[:compared]
    exact = case.a[rows].double() @ case.b.double()
    outputs = references.baselines(case, rows)
    named = {f"baseline {number}": output for number, output in enumerate(outputs, 1)}
    require_finite(gemm, A=case.a, B=case.b, **{"the product in fp64": exact}, **named)
    errors = [output.double() - exact for output in outputs]
    rms = torch.stack([error.square().mean().sqrt() for error in errors]).max().cpu()
    if not rms <= max(UNRELATED, FP16_SUM * gemm.k**0.5) * gemm.k**0.5:
        raise MachineError(
            f"a baseline of {gemm} is {float(rms):.3g} off the fp64 product of the same inputs (RMS): is the memory of"
            " this machine sound?"
        )
    spread = max((float((x.float() - y.float()).abs().max()) for x in outputs for y in outputs), default=0.0)
    case.expected.update(
        rows=rows,
        fp64=exact,
        # single numbers, on the CPU: reading one from the GPU waits for it
        rms=rms,
        max=torch.stack([error.abs().max() for error in errors]).max().cpu(),
        step=torch.tensor(step(float(exact.abs().max()), case.a.dtype)),
        spread=torch.tensor(spread),
    )
    return case


CHECK = BaselineDeviation()
