"""Figure 4 and the paper's section 6: how the best schedules depend on the shape, and its rules beside our evidence."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cuda_l2.records import Gemm, Interval
from cuda_l2.report.page.records import Case

LEAST = 10
"""Shapes below which a correlation says nothing."""


@dataclass(frozen=True)
class Choice:
    """What the best schedule of a shape chose, in terms of the shape. None: the family has no such choice."""

    case: Case
    gemm: Gemm
    bm: int  # rows of C a block computes
    bn: int  # columns
    bk: int  # of K in a stage
    stages: int
    swizzle: int | None  # tiles across a band, box or strip of tiles; 0 where tiles are walked row by row


def choices(cases: Sequence[Case]) -> list[Choice]:
    """Choices of every case whose kernel has tiles of the papers' kind."""
    found = []
    for case in cases:
        kernel = case.best
        named = kernel.choices if kernel else {}
        if not kernel or not case.gemm or not {"BM", "BN", "STAGES"} <= set(named):
            continue
        bm, bn = (named["BN"], named["BM"]) if named.get("SWAP") else (named["BM"], named["BN"])
        bk = named.get("BK") or 64 * named.get("KB", 1)
        found.append(Choice(case, case.gemm, bm, bn, bk, named["STAGES"], _swizzle(named, bn)))
    return found


def _swizzle(named: dict[str, int], bn: int) -> int | None:
    if "BLOCK_SWIZZLE" in named:
        return max(1, named["BLOCK_SWIZZLE"] // bn) if named["BLOCK_SWIZZLE"] else 0
    width = named.get("BAND", named.get("ORDER"))
    return None if width is None else width if width > 1 else 0


def correlation(x: Sequence[float], y: Sequence[float], *, ranks: bool = False) -> Interval | None:
    """Pearson's coefficient with its 95 % interval by Fisher's transformation; of ranks: Spearman's."""
    a, b = (_ranks(values) if ranks else np.asarray(values, float) for values in (x, y))
    if len(a) < LEAST or not a.std() or not b.std():
        return None
    r = float(np.clip(np.corrcoef(a, b)[0, 1], -1, 1))
    if abs(r) > 1 - 1e-12:
        return Interval(r, r, r)
    half = 1.96 / math.sqrt(len(a) - 3)
    return Interval(r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, at, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    ranks: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[at]
    return ranks


@dataclass(frozen=True)
class Claim:
    """A rule of section 6, and the paper's evidence. weak: it says that a correlation is weak."""

    figure: str
    words: str
    theirs: str
    rho: float | None
    weak: bool = False


@dataclass(frozen=True)
class Rule:
    """A rule, and our evidence."""

    claim: Claim
    ours: Interval | None  # Pearson's coefficient
    ours_by_rank: Interval | None
    evidence: str
    verdict: str


AGREES, WEAKER, DIFFERS, UNKNOWN = "for", "weaker than theirs", "against", "too few schedules to say"
BELOW, WITHOUT, WEAK = 0.2, 0.5, 0.5
JUDGED = (
    f"For: our coefficient, of values or by rank, is at most {BELOW} below theirs ({WITHOUT} where they give"
    f" none); weaker: its interval lies above 0; against: neither. 4c: for where the one by rank is below {WEAK}."
)

Value = Callable[[Choice], float]


def rules(found: Sequence[Choice]) -> list[Rule]:
    """The six rules, each with our evidence for or against it."""
    swizzled = [choice for choice in found if choice.swizzle is not None]
    return [
        _rule(Claim("4a", "BM grows with M.", "BM from about 60 to 160 from M <= 256 to M > 4096", 0.652), found,
              lambda c: c.gemm.m, lambda c: c.bm, _ends(found, "M", lambda c: c.gemm.m, "BM", lambda c: c.bm)),
        _rule(Claim("4b", "BN grows with N.", "the strongest of the three", 0.705), found,
              lambda c: c.gemm.n, lambda c: c.bn, _ends(found, "N", lambda c: c.gemm.n, "BN", lambda c: c.bn)),
        _rule(Claim("4c", "BK depends on K only weakly.", "a weak correlation", 0.256, weak=True), found,
              lambda c: c.gemm.k, lambda c: c.bk, _ends(found, "K", lambda c: c.gemm.k, "BK", lambda c: c.bk)),
        _rule(Claim("4d", "BM and BN are of similar size.", "same or similar values", 0.695), found,
              lambda c: c.bm, lambda c: c.bn, _similar(found)),
        _rule(Claim("4e", "Stages grow with K.", "2 to 3 stages for K <= 128, 6 and more for K > 8192", None), found,
              lambda c: c.gemm.k, lambda c: c.stages, _stages(found)),
        _rule(Claim("4f", "Block swizzling is used more, and wider, as the product grows.",
                    "44 % below 2^27, 73 to 80 % from 2^27 to 2^33, 99 % above 2^36", 0.453), swizzled,
              _log_size, lambda c: c.swizzle or 0, _swizzling(swizzled)),
    ]  # fmt: skip


def _rule(claim: Claim, found: Sequence[Choice], x: Value, y: Value, evidence: str) -> Rule:
    points = [x(choice) for choice in found], [y(choice) for choice in found]
    ours, by_rank = correlation(*points), correlation(*points, ranks=True)
    if not ours or not by_rank:
        verdict = UNKNOWN
    elif claim.weak:
        verdict = AGREES if abs(by_rank.estimate) < WEAK else DIFFERS
    elif max(ours.estimate, by_rank.estimate) >= (claim.rho or WITHOUT) - BELOW and by_rank.low > 0:
        verdict = AGREES
    else:
        verdict = WEAKER if by_rank.low > 0 or ours.low > 0 else DIFFERS
    return Rule(claim, ours, by_rank, evidence, verdict)


def _log_size(choice: Choice) -> float:
    return math.log2(choice.gemm.m * choice.gemm.n * choice.gemm.k)


def _ends(found: Sequence[Choice], size: str, x: Value, tile: str, y: Value) -> str:
    small = [y(choice) for choice in found if x(choice) <= 256]
    large = [y(choice) for choice in found if x(choice) > 4096]
    if not small or not large:
        return f"there are no shapes with both {size} <= 256 and {size} > 4096"
    return f"mean {tile} {np.mean(small):.0f} for {size} <= 256, {np.mean(large):.0f} for {size} > 4096"


def _similar(found: Sequence[Choice]) -> str:
    if not found:
        return "no schedules with tiles"
    near = sum(max(choice.bm, choice.bn) <= 2 * min(choice.bm, choice.bn) for choice in found) / len(found)
    same = sum(choice.bm == choice.bn for choice in found) / len(found)
    return f"BM = BN for {same:.0%} of the shapes, within a factor of 2 for {near:.0%}"


def _stages(found: Sequence[Choice]) -> str:
    small = [choice.stages for choice in found if choice.gemm.k <= 128]
    large = [choice.stages for choice in found if choice.gemm.k > 8192]
    if not small or not large:
        return "there are no shapes with both K <= 128 and K > 8192"
    return f"median {np.median(small):g} stages for K <= 128, {np.median(large):g} for K > 8192"


def _swizzling(found: Sequence[Choice]) -> str:
    said = []
    for words, low, high in (("below 2^27", 0, 27), ("from 2^27 to 2^33", 27, 33), ("above 2^36", 36, 99)):
        members = [choice for choice in found if low <= _log_size(choice) < high]
        if members:
            said.append(f"{sum(bool(choice.swizzle) for choice in members) / len(members):.0%} {words}")
    return "used by " + ", ".join(said) if said else "no schedule says how tiles are walked"


def hopper(found: Sequence[Choice]) -> str:
    """Why rules of the A100 need not hold on Hopper; empty on other devices."""
    if not any(str(choice.case.origin.environment.get("arch", "")).startswith("sm_90") for choice in found):
        return ""
    wide = [choice for choice in found if choice.case.best and choice.case.best.family.startswith("sm90")]
    tall = sum(max(choice.bm, choice.bn) >= 128 for choice in wide)
    return (
        f"Hopper differs from the A100. {len(wide)} of {len(found)} best schedules use wgmma: a warpgroup multiplies"
        " tiles of 64 rows and up to 256 columns, so BM and BN take few values, and 64 is the least of one of them."
        f" {tall} of these have a side of 128 or more. A stage of the ring holds 64, 128 or 256 of K, filled by"
        " TMA, so BK hardly varies, and what is left of shared memory decides the number of stages: large tiles have"
        " fewer of them. Tiles are walked in bands and boxes of tiles, where the A100's kernels use strips of columns."
    )
