"""Is the algorithm that autotuning chose still the best? All that the heuristic returned, timed again in one run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cuda_l2.measure.sampler import Samples
from cuda_l2.records import Gemm, Interval, Layout
from cuda_l2.runs.grid import bucket, bucket_name
from cuda_l2.runs.run_file import RunFile
from cuda_l2.system.files import csv_text, markdown_table

if TYPE_CHECKING:
    from cuda_l2.measure.libraries import Libraries

ALLOWED = 1.01
"""A choice counts as right up to so many times the best algorithm's time."""
ROUNDS = 15
KIND = "cuda-l2 choices"
COLUMNS = (
    *("m", "n", "k", "layout", "accumulate", "dtype", "algorithms", "chosen", "best", "chosen_us", "best_us"),
    *("ratio", "ratio_low", "ratio_high", "right"),
)


@dataclass(frozen=True)
class Audited:
    """One product in one layout. chosen and best are places in the order in which the heuristic returned them."""

    gemm: Gemm
    algorithms: int
    chosen: int
    best: int
    chosen_us: float
    best_us: float
    ratio: Interval
    """Time of the choice over that of the best, paired by round; the best was picked from these very rounds."""

    @property
    def right(self) -> bool:
        return self.ratio.estimate <= ALLOWED

    def row(self) -> dict[str, object]:
        """By the names of COLUMNS."""
        gemm, ratio = self.gemm, self.ratio
        times = f"{self.chosen_us:.4g}", f"{self.best_us:.4g}"
        interval = f"{ratio.estimate:.4f}", f"{ratio.low:.4f}", f"{ratio.high:.4f}"
        cells = (gemm.m, gemm.n, gemm.k, gemm.layout, gemm.accumulate, gemm.dtype)
        ranks = (self.algorithms, self.chosen, self.best)
        return dict(zip(COLUMNS, (*cells, *ranks, *times, *interval, int(self.right)), strict=True))


@dataclass(frozen=True)
class Audit:
    """One product in all layouts that have a choice."""

    gemm: Gemm
    choices: tuple[Audited, ...]

    @property
    def key(self) -> Gemm:
        return self.gemm


class AuditFile(RunFile[Audit]):
    """The audits of a run, from which an interrupted one goes on. A context manager."""

    record = Audit

    def pending(self, gemms: Sequence[Gemm]) -> list[Gemm]:
        return [gemm for gemm in gemms if gemm not in self._found]

    @property
    def choices(self) -> list[Audited]:
        return [choice for audit in self.records for choice in audit.choices]


def compared(gemm: Gemm, layout: Layout, chosen: int, count: int, times_us: Samples[int]) -> Audited:
    """From microseconds of so many algorithms, all rounds interleaved."""
    medians = [times_us.median(algorithm) for algorithm in range(count)]
    best, of = medians.index(min(medians)), replace(gemm, layout=layout)
    return Audited(of, count, chosen, best, medians[chosen], medians[best], times_us.ratio(chosen, best))


def audit(libraries: "Libraries", gemm: Gemm) -> Audit:
    """Both layouts of a product; a choice is made first where none is kept. Needs a GPU."""
    import torch  # noqa: PLC0415

    from cuda_l2.machine.tensors import dtype_of  # noqa: PLC0415
    from cuda_l2.measure.launches import Buffers  # noqa: PLC0415

    half = {"dtype": dtype_of(gemm), "device": "cuda"}
    a, b = torch.randn(gemm.m, gemm.k, **half), torch.randn(gemm.k, gemm.n, **half)  # type: ignore[call-overload]
    b_tn, c = b.t().contiguous(), torch.empty(gemm.m, gemm.n, **half)  # type: ignore[call-overload]
    buffers = Buffers(*(tensor.data_ptr() for tensor in (a, b, b_tn, c)))
    torch.cuda.synchronize()
    libraries.hold(gemm)
    try:
        tuned, found = libraries.tune(gemm, buffers), []
        for layout in Layout:
            choice = tuned.of(layout)
            if choice:
                times_us = libraries.retime(gemm, layout, buffers, ROUNDS)
                found.append(compared(gemm, layout, choice.chosen, len(choice.algorithms), times_us))
    finally:
        libraries.release(gemm)  # what is set up for a shape goes once others came
    return Audit(gemm, tuple(found))


def rows_csv(audited: Sequence[Audited]) -> str:
    """One row a product and layout, as CSV."""
    return csv_text(COLUMNS, [tuple(each.row().values()) for each in audited])


def table(audited: Sequence[Audited]) -> str:
    """By size: how many choices, how many right, the worst. audited: at least one."""
    firsts, rows = sorted({bucket(each.gemm) for each in audited}), []
    for name, own in [
        *((bucket_name(first), [each for each in audited if bucket(each.gemm) == first]) for first in firsts),
        ("all", list(audited)),
    ]:
        ratios = [each.ratio.estimate for each in own]
        worst = max(own, key=lambda each: each.ratio.estimate)
        figures = f"{sum(ratios) / len(ratios):.4f}", f"{worst.ratio.estimate:.4f}, {worst.gemm}"
        rows.append((name, len(own), sum(each.right for each in own), *figures))
    return "\n".join(markdown_table(("log2(MNK)", "choices", "within 1 %", "mean", "worst"), rows))
