"""Times kernels on one shape as a report of a table does: all in one run, beside cuBLASLt's, on a chip as hot as there.

To choose by, where quicker times do not tell. A launch that meets the power limit is slower on a hot chip than on a
cool one, by more than kernels differ.
"""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cuda_l2.measure.baselines._base import product_baselines
from cuda_l2.measure.baselines.cublaslt_autotuned import KIND
from cuda_l2.measure.protocols import CUDA_PROTOCOLS, OFFLINE, SERVER, Protocol, brief
from cuda_l2.measure.quick import DEPENDENT, PLAIN, Sampled
from cuda_l2.measure.rounds import Kernel
from cuda_l2.records import BuildStatus, Candidate, Gemm, Layout
from cuda_l2.rigs import Bench, Request, open_rig
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError

FINALISTS = 2
"""Kernels a layout that are timed again beside the table's own, where they looked faster than it."""
FINAL_ROUNDS = 2
"""Times the rounds of a report, whose 11 leave an error of 0.7 % in the ratio of two kernels from 2^34 up."""


def protocols(*, cold: bool) -> tuple[Protocol, Protocol]:
    """How all are timed, and how finalists are: as a table's report does, and with more rounds."""
    first = brief(CUDA_PROTOCOLS[(SERVER if cold else OFFLINE).name])
    rounds = FINAL_ROUNDS * first.max_rounds
    return first, replace(first, min_rounds=rounds, max_rounds=rounds)


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel in one order of tiles: as it is launched plainly, and as a dependent where that is timed too."""

    layout: Layout
    plain: Candidate
    dependent: Candidate | None = None
    own: bool = False  # the table launches it so for this shape

    @property
    def candidates(self) -> dict[int, Candidate]:
        """By place among the times."""
        return {PLAIN: self.plain} | ({DEPENDENT: self.dependent} if self.dependent else {})


class ReportTimer(Closing):
    """One GPU, set up once for all shapes. A context manager."""

    def __init__(self, choices: Path | None = None, *, cold: bool = False) -> None:
        """choices: file of cuBLASLt's chosen algorithms. cold: single launches with nothing cached."""
        bars = tuple(each for each in product_baselines("cuda") if each.kind == KIND)
        self._first, self._final = protocols(cold=cold)
        self._rig = open_rig("cuda", Request(bars, choices=choices))

    def time(self, gemm: Gemm, entries: Sequence[Entry]) -> list[Sampled]:
        """Medians of every entry, in order; of finalists also those of a second run. The caller holds the GPU's lock.

        UserError where a kernel does not build.
        """
        found = [Sampled() for _ in entries]
        with self._rig.open(gemm.any_layout, secrets.randbits(48), both_layouts=True) as bench:
            for (number, edge), us in self._times(bench, dict(enumerate(entries)), self._first).items():
                found[number].first[edge] = us
            again = finalists(entries, found)
            for (number, edge), us in self._times(bench, {i: entries[i] for i in again}, self._final).items():
                found[number].final[edge] = us
        return [replace(each, reason="" if math.isfinite(each.first[PLAIN]) else "not measured") for each in found]

    def close(self) -> None:
        self._rig.close()

    def _times(self, bench: Bench, entries: dict[int, Entry], protocol: Protocol) -> dict[tuple[int, int], float]:
        """Microseconds by number and place, of those that were measured."""
        named = {f"{i} {edge}": (i, edge) for i, entry in entries.items() for edge in entry.candidates}
        candidates = [entries[i].candidates[edge] for i, edge in named.values()]
        kernels = {}
        for name, candidate, build in zip(named, candidates, bench.build(candidates), strict=True):
            if build.status is not BuildStatus.BUILT:
                raise UserError(f"a kernel of the table, {candidate.family}, does not build: {build.reason}")
            kernels[name] = Kernel(candidate, build, entries[named[name][0]].layout)
        timings = bench.time_kernels(kernels, protocol) if kernels else {}
        return {named[name]: each.candidate.latency_us.estimate for name, each in timings.items() if each.candidate}


def finalists(entries: Sequence[Entry], found: Sequence[Sampled]) -> list[int]:
    """Those to be timed again: of each layout the table's own with what looked faster, as far as something did."""
    again: list[int] = []
    for layout in Layout:
        mine = [i for i, entry in enumerate(entries) if entry.layout is layout]
        own = [i for i in mine if entries[i].own]
        times = {i: found[i].first[PLAIN] for i in mine if math.isfinite(found[i].first[PLAIN])}
        bar = min((times[i] for i in own if i in times), default=math.inf)
        faster = sorted((i for i in times if i not in own and times[i] < bar), key=lambda i: times[i])
        if faster:
            again += [*own, *faster[:FINALISTS]]
    return again
