"""Times a library's kernels shape by shape: plain and dependent launches, both layouts, all baselines, in one run."""

import contextlib
import hashlib
import secrets
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

from cuda_l2 import contract
from cuda_l2.build.build_server import BuildServers
from cuda_l2.library.table import COLD, PLAIN, PROGRAMMATIC, Named, Row, read_table
from cuda_l2.machine import gpus
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure.protocols import OFFLINE, Protocol, brief
from cuda_l2.measure.rounds import CANDIDATE, Kernel
from cuda_l2.records import BuildStatus, Candidate, Gemm, Timing
from cuda_l2.rigs import Rig
from cuda_l2.runs.results import KernelFigures
from cuda_l2.system.errors import UserError

Timed = tuple[Row, Candidate, Timing]
MOST_CORES = 16
"""Cores that builds take: a table has few kernels, and a hundred compilers that start at once delay the first."""
FIRST = 4
"""Shapes whose kernels are begun so: on up to this many GPUs each process takes one of them first."""


def first_builds(library: "Library", gemms: Sequence[Gemm]) -> BuildServers | None:
    """Servers that build the kernels of a run's first shapes for the GPU, if there is one, while torch still loads."""
    arch = gpus.architecture()
    if not arch:
        return None
    target = compile_only(arch)
    target = replace(target, cores=min(target.cores, MOST_CORES))
    builders = BuildServers(target)
    for gemm in gemms[:FIRST]:
        with contextlib.suppress(UserError):  # said when it is the shape's turn
            builders.begin(library.candidates(gemm, target))
    return builders


class Library:
    """A table of kernels by shape, to be timed on a rig."""

    def __init__(self, table: Path) -> None:
        self.table = table
        self._rows: dict[Gemm, list[Row]] = {}
        plain: set[tuple[Gemm, Named]] = set()
        for row in sorted(read_table(table), key=lambda row: row.edge != PLAIN):
            if row.edge == PLAIN:
                plain.add((row.gemm, row.schedule))
            elif row.edge == PROGRAMMATIC and (row.gemm, row.schedule) in plain:
                continue  # dependent launch gained nothing: the same launch again
            self._rows.setdefault(row.gemm.any_layout, []).append(row)
        self._hash = hashlib.sha256(table.read_bytes()).hexdigest()[:16]

    def described(self) -> dict[str, object]:
        """What figures of the library depend on."""
        return {"library": self._hash}

    def serves(self, gemm: Gemm) -> bool:
        """Whether the table has a kernel for a shape."""
        return gemm.any_layout in self._rows

    def candidates(self, gemm: Gemm, target: Target) -> list[Candidate]:
        """The kernels of a shape in all layouts and launches; none where the table does not have it."""
        return [row.candidate(target) for row in self._rows.get(gemm.any_layout, ())]

    def time(self, gemm: Gemm, protocols: Sequence[Protocol], rig: Rig) -> Generator[list[Timed]]:
        """Protocol by protocol, what the table has for a shape that it serves, the fastest plain launch first.

        All that was chosen back to back under `offline`; under others what would be used: the fastest plain launch and
        the fastest of all, or where single launches are timed the fastest cold one, if the table has one. The caller
        holds the GPU's lock.
        """
        rows = sorted(self._rows[gemm.any_layout], key=lambda row: (row.edge == PROGRAMMATIC, row.us))
        candidates = [row.candidate(rig.target) for row in rows]
        with rig.open(gemm, secrets.randbits(48), both_layouts=True) as bench:
            builds = list(bench.build(candidates))
            failed = next((build for build in builds if build.status is not BuildStatus.BUILT), None)
            if failed:
                raise UserError(f"a kernel of {self.table} for {gemm} does not build: {failed.reason}")
            parts = list(zip(rows, candidates, builds, strict=True))
            for protocol in protocols:
                used = _used(rows, protocol)
                timed = [part for part in parts if part[0] in used]
                kernels = {
                    f"{row.gemm.layout} {row.edge}": Kernel(candidate, build, row.gemm.layout)
                    for row, candidate, build in timed
                }
                timings = bench.time_kernels(kernels, brief(protocol))
                pairs = zip(timed, timings.values(), strict=True)
                yield [(row, candidate, timing) for (row, candidate, _), timing in pairs]


def headline(timed: Sequence[Timed]) -> Timing:
    """The timing of the first kernel, the fastest plain launch of the run that selected."""
    timing = timed[0][2]
    if timing.candidate is None:
        return timing
    return replace(timing, candidate=replace(timing.candidate, name=CANDIDATE))


def figures(timed: Sequence[Timed]) -> tuple[KernelFigures, ...]:
    """What a results file keeps of every kernel."""
    return tuple(
        KernelFigures(
            row.gemm.layout,
            row.edge == PROGRAMMATIC,
            contract.kernel_id(candidate.source),
            row.family,
            row.schedule,
            row.us,
            timing.candidate.latency_us,
            timing.speedups,
            timing.max_difference,
        )
        for row, candidate, timing in timed
        if timing.candidate
    )


def _used(rows: Sequence[Row], protocol: Protocol) -> Sequence[Row]:
    """Those of a shape's rows, plain launches first, that are timed under a protocol."""
    cold = [row for row in rows if row.edge == COLD]
    if cold and not protocol.round_s:
        return cold[:1]
    warm = [row for row in rows if row.edge != COLD] or rows
    return warm if protocol.name == OFFLINE.name else [warm[0], min(warm, key=lambda row: row.us)]
