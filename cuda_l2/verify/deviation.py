"""Baseline-bounded deviation (paper section 2.3), reported as printed and gated in a form baselines themselves pass.

Printed: the candidate's largest deviation may not exceed the largest difference among baselines; but baselines
often agree bit for bit, and then every other summation order fails. Gated: against fp64, the root mean square
error is at most 1.25 times the worst baseline's, and the largest error at most the worst baseline's plus one step of
C's type, over five inputs; both twice the worst baseline's in the fp16 class. A few rows of A and columns of B are
small there, and a few are small in one half of K each; the first bound holds for those alone too, over all inputs. So
it does not suffice to be as precise as the largest numbers need, as in fixed point.

In the fp32 class the share of elements that are not the fp64 product rounded to C's type is bounded too. It is the
error of the sum before that rounding in steps of C, which the RMS error hides: what leaves out a bit of an operand, or
rounds a part of a sum, where inputs look ordinary, shows here. What fp32 sums allow grows with K, in fp16 to 1.2 % of C
at K = 512 and 9 % at 4096, in bf16 to an eighth of that; a bit less of A in a 32nd of K changes 6 to 9 % at any K.
"""

import torch

from cuda_l2.records import Accumulate, VerdictStatus
from cuda_l2.system.errors import MachineError
from cuda_l2.tasks.products import ProductCase, ProductCases, require_finite
from cuda_l2.tasks.tolerances import SUMMATION_NOISE
from cuda_l2.verify._base import CheckFailed, ProductCheck, Session, Turn

INPUTS = 5
RMS_FACTOR = {Accumulate.FP32: 1.25, Accumulate.FP16: 2.0}
MAX_FACTOR = {Accumulate.FP32: 1.0, Accumulate.FP16: 2.0}
"""Sums in fp16 err by their order, so that the largest error has the factor of the RMS error there."""
UNRELATED, FP16_SUM = 0.25, 2.0**-12
"""A baseline further off than the first, or the second times the square root of K, of what C's elements have for their
RMS, sqrt(K), computed something else, or the fp64 product is another's; a bound from it would hold for anything. The
second is more than sums kept in fp16 lose."""
LINES, SMALL = 1 / 32, 2.0**-6
"""Share of rows of A, and of columns of B, that are multiplied by SMALL; as many are in one half of K."""
LEAST_LINES = 4
"""Rows, or columns, from which on some are small."""
LEAST_ELEMENTS = 64
"""Elements over all inputs from which on RMS errors are compared: that of fewer varies too much."""
GROUPS = "small rows of A", "small columns of B", "rows and columns of which one is small"
ROUNDINGS = 1 / 4
"""Roundings of a partial sum as large as the sum that fp32 sums may have, over K: twice those of tensor instructions
of 8 products."""
LARGE = 1.0
"""Elements at least this many times their standard deviation are compared: the others' steps are finer than sums."""
SIGMAS = 6.0
FP16_ROWS = 32
"""Rows compared in the fp16 class on the CPU, whose baseline is an emulated fp16 sum."""


class BaselineDeviation(ProductCheck):
    name = "baseline-bounded deviation"
    order = 35

    def run_on(self, session: Session, cases: ProductCases) -> None:
        factor, slack = RMS_FACTOR[cases.task.accumulate], SUMMATION_NOISE * cases.task.k**0.5
        worst_rms = worst_max = allowed = deviation = 0.0
        squares_G, theirs_G = [0.0] * len(GROUPS), [0.0] * len(GROUPS)
        rounded_otherwise = torch.zeros((), dtype=torch.int64, device=cases.device)
        counted = likely = 0.0
        for turn, found in session.launch_each(Turn(cases.get("normal", index, _make)) for index in range(INPUTS)):
            case = turn.case
            rows, exact = case.expected["rows"], case.expected["fp64"]
            error = found["c"][rows].double() - exact
            if cases.task.accumulate is Accumulate.FP32:
                rounded_otherwise += ((found["c"][rows] != case.expected["rounded"]) & case.expected["large"]).sum()
                counted, likely = (
                    value + more
                    for value, more in zip((counted, likely), case.expected["likely"].tolist(), strict=True)
                )
            rms, *rms_G, largest = torch.cat([_rms(case, error), error.abs().max()[None]]).tolist()
            theirs, *others_G = case.expected["rms"].tolist()
            rms_allowed = factor * theirs + slack
            squares_G = [sum_ + rms_ * rms_ for sum_, rms_ in zip(squares_G, rms_G, strict=True)]
            theirs_G = [sum_ + rms_ * rms_ for sum_, rms_ in zip(theirs_G, others_G, strict=True)]
            most = MAX_FACTOR[cases.task.accumulate] * float(case.expected["max"])
            max_allowed = most + float(case.expected["step"]) + slack
            worst_rms, worst_max = max(worst_rms, rms), max(worst_max, largest)
            allowed = max(allowed, max_allowed)
            deviation = max(deviation, float(case.expected["spread"]))
            _require(rms, rms_allowed)
            if not largest <= max_allowed:
                raise CheckFailed(
                    VerdictStatus.IMPRECISE,
                    f"largest error {largest:.3g} against fp64; the baselines allow {max_allowed:.3g}",
                )
        for group, ours, others in zip(GROUPS, squares_G, theirs_G, strict=True):
            _require((ours / INPUTS) ** 0.5, factor * (others / INPUTS) ** 0.5 + slack, f" in {group}")
        _require_rounded(int(rounded_otherwise), counted, likely)
        session.rms_error, session.max_error, session.baseline_deviation = worst_rms, worst_max, deviation
        session.max_allowed = allowed


def _require(rms: float, allowed: float, where: str = "") -> None:
    """CheckFailed where the candidate's RMS error is too large."""
    if not rms <= allowed:
        reason = f"RMS error {rms:.3g} against fp64{where}; the baselines allow {allowed:.3g}"
        raise CheckFailed(VerdictStatus.IMPRECISE, reason)


def _require_rounded(found: int, counted: float, likely: float) -> None:
    """CheckFailed where more elements than fp32 sums explain are not the exact product rounded to C's type."""
    if found > likely + SIGMAS * (likely + 1) ** 0.5:
        raise CheckFailed(
            VerdictStatus.IMPRECISE,
            f"{found / counted:.2%} of C is not the exact product rounded to its type; sums in fp32 allow"
            f" {likely / counted:.2%}: an operand, or a part of a sum, has lost bits",
        )


def _rounding(case: ProductCase, rows: torch.Tensor, exact_RN: torch.Tensor) -> dict[str, torch.Tensor]:
    """What C is where rounded correctly, which elements are compared, their number, and how many may differ."""
    k = case.task.k
    deviation_RN = case.a[rows].double().norm(dim=1)[:, None] * case.b.double().norm(dim=0) / k**0.5
    large = exact_RN.abs() >= LARGE * deviation_RN
    steps = 2 * torch.frexp(exact_RN.abs()).mantissa / torch.finfo(case.a.dtype).eps  # in an element
    otherwise = (ROUNDINGS * k * 2.0**-24 * steps).clamp(max=1.0)
    counted = torch.stack([large.double().sum(), otherwise[large].sum()])
    return {"rounded": exact_RN.to(case.a.dtype), "large": large, "likely": counted.cpu()}


def step(magnitude: float, dtype: torch.dtype) -> float:
    """The distance between numbers of a type at a magnitude."""
    limits = torch.finfo(dtype)
    value = torch.tensor(min(magnitude, limits.max), dtype=dtype)
    below = torch.nextafter(value, torch.tensor(0.0, dtype=dtype))
    return max(float(value) - float(below), limits.smallest_normal * limits.eps)


def _weights(few: tuple[int, int], shape: tuple[int, int], columns: torch.Tensor) -> dict[str, torch.Tensor]:
    """What rows, and columns, count in the mean square of all elements and of each group's.

    few: numbers of small rows among the first ones, and of small columns among the first of `columns`.
    """

    def spread(size: int, count: int) -> tuple[torch.Tensor, ...]:
        """Over all, over the first ones, over those behind them."""
        at = torch.arange(size, device=columns.device)
        return tuple(chosen.double() / chosen.sum() for chosen in (at >= 0, at < count, at // count == 1))

    rows, across = spread(shape[0], few[0]), spread(shape[1], few[1])
    pairs = ((0, 0), (1, 0), (0, 1), (2, 2))
    sizes = [(size, count, count) for size, count in zip(shape, few, strict=True)]
    counted = [INPUTS * sizes[0][one] * sizes[1][two] >= LEAST_ELEMENTS or one == two == 0 for one, two in pairs]
    columns_GN = torch.zeros(len(pairs), shape[1], dtype=torch.float64, device=columns.device)
    columns_GN[:, columns] = torch.stack(
        [across[two] * counts for (_, two), counts in zip(pairs, counted, strict=True)]
    )
    return {"rows_GR": torch.stack([rows[one] for one, _ in pairs]).nan_to_num(), "columns_GN": columns_GN.nan_to_num()}


def _rms(case: ProductCase, error_RN: torch.Tensor) -> torch.Tensor:
    """The RMS error of all elements, and of each group's."""
    squares_GN = case.expected["rows_GR"] @ error_RN.square()
    return (squares_GN * case.expected["columns_GN"]).sum(1).sqrt()


def _make(cases: ProductCases, generator: torch.Generator) -> ProductCase:
    gemm, references = cases.task, cases.references
    a, b = cases.normal(generator)
    compared = max(1, int(gemm.m * min(1.0, references.exact_flops / gemm.flops)))
    if gemm.accumulate is Accumulate.FP16 and cases.device.type == "cpu":
        compared = min(compared, FP16_ROWS)
    rows = torch.randperm(gemm.m, generator=generator, device=cases.device)[:compared]
    columns = torch.randperm(gemm.n, generator=generator, device=cases.device)
    half = torch.rand(gemm.k, generator=generator, device=cases.device) < 0.5
    few = max(1, int(LINES * compared)), max(1, int(LINES * gemm.n))
    for lines, chosen, count, part in ((a, rows, few[0], half), (b.t(), columns, few[1], ~half)):
        if len(chosen) < LEAST_LINES:
            continue
        lines[chosen[:count]] *= SMALL
        lines[chosen[count : 2 * count]] *= torch.where(part, SMALL, 1.0)
    case = cases.operands(a, b)
    case.expected.update(_weights(few, (compared, gemm.n), columns))
    exact = case.a[rows].double() @ case.b.double()
    outputs = references.baselines(case, rows)
    named = {f"baseline {number}": output for number, output in enumerate(outputs, 1)}
    require_finite(gemm, A=case.a, B=case.b, **{"the product in fp64": exact}, **named)
    errors = [output.double() - exact for output in outputs]
    rms_G = torch.stack([_rms(case, error) for error in errors]).amax(0).cpu()
    rms = rms_G[0]
    if not rms <= max(UNRELATED, FP16_SUM * gemm.k**0.5) * gemm.k**0.5:
        raise MachineError(
            f"a baseline of {gemm} is {float(rms):.3g} off the fp64 product of the same inputs (RMS): is the memory of"
            " this machine sound?"
        )
    if gemm.accumulate is Accumulate.FP32:
        case.expected.update(_rounding(case, rows, exact))
    spread = max((float((x.float() - y.float()).abs().max()) for x in outputs for y in outputs), default=0.0)
    case.expected.update(
        rows=rows,
        fp64=exact,
        # single numbers, on the CPU: reading one from the GPU waits for it
        rms=rms_G,
        max=torch.stack([error.abs().max() for error in errors]).max().cpu(),
        step=torch.tensor(step(float(exact.abs().max()), case.a.dtype)),
        spread=torch.tensor(spread),
    )
    return case


CHECK = BaselineDeviation()
