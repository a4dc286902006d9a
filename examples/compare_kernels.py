"""Times edited copies of the GPU families' sources beside the originals: is a change to a kernel worth it?

    cp -r cuda_l2/families /tmp/lean && $EDITOR /tmp/lean/sm90_wave.cu
    python examples/compare_kernels.py /tmp/lean --sample 120
    python examples/compare_kernels.py /tmp/lean /tmp/other --sample 60 --cold

For a sample of a dispatch table's shapes the kernel that serves each is built from every folder and timed,
interleaved, as `cuda-l2 select` does: plain launches back to back, or with --cold single ones with nothing cached.
Prints how many times as fast as the original each folder's are, shape by shape as it goes, then by family and size:
of what was compared, where Ctrl-C or a time limit ends it. Needs an NVIDIA GPU of the table's kind.
"""

import argparse
import contextlib
import itertools
import math
import pickle
import signal
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from cuda_l2 import contract
from cuda_l2.build.build_server import BuildServers
from cuda_l2.families._base import inlined
from cuda_l2.library.table import COLD, PLAIN, Row, family_of, read_table
from cuda_l2.machine.cuda import target as cuda
from cuda_l2.machine.cuda.driver import bus_id
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.measure.quick import Item, QuickTimer
from cuda_l2.records import Accumulate, Build, BuildStatus, Candidate
from cuda_l2.report.library import BUCKETS
from cuda_l2.runs import grid
from cuda_l2.system.errors import MachineError, UserError
from cuda_l2.system.lock import machine_lock
from cuda_l2.system.text import counted

ORIGINAL = Path(__file__).parents[1] / "cuda_l2" / "families"
FINALISTS = 16
"""All of a shape's, at any number of folders that makes sense."""


def edited(row: Row, target: CudaTarget, folder: Path) -> Candidate:
    """The row's kernel, its family's source taken from another folder."""
    candidate, source = row.candidate(target), family_of(row.family).source
    text, own = candidate.source, inlined(source)
    if not text.endswith(own):
        raise UserError(f"{row.family}: its text does not end with {source.name}")
    return Candidate(text.removesuffix(own) + inlined(folder / source.name), "table", row.schedule, row.family)


def sampled(rows: Iterable[Row], count: int, seed: int, edge: str) -> list[Row]:
    """The rows of so many sizes, both layouts, in random order."""
    of = {row.gemm: row for row in rows if row.edge == edge and row.gemm.accumulate is Accumulate.FP32}
    if not of:
        raise UserError(f"the table has no {edge} row with fp32 sums")
    return [of[gemm] for gemm in grid.shuffled(grid.sample(of, count, seed), seed)]


def compare(
    rows: Sequence[Row], folders: Sequence[Path], target: CudaTarget, cold: bool
) -> Iterator[tuple[Row, dict[Path, float]]]:
    """Row by row, how many times as fast as the first folder's kernel each other folder's is; not those that fail.

    Kernels of later rows are built, by several processes, while earlier ones are timed.
    """
    candidates = [[edited(row, target, folder) for folder in folders] for row in rows]
    servers = BuildServers(target)
    try:
        builds = servers.build(list(itertools.chain(*candidates)))
        with machine_lock(bus_id()), QuickTimer(0, FINALISTS, cold=cold) as timer:
            for row, own in zip(rows, candidates, strict=True):
                built = zip(own, itertools.islice(builds, len(own)), strict=True)
                times = _times(row, dict(zip(folders, built, strict=True)), target, timer)
                base = times.get(folders[0], math.nan)
                ratios = {folder: base / us for folder, us in times.items() if folder != folders[0]}
                yield row, {folder: ratio for folder, ratio in ratios.items() if math.isfinite(ratio)}
    finally:
        servers.close()


def _times(
    row: Row, built: Mapping[Path, tuple[Candidate, Build]], target: CudaTarget, timer: QuickTimer
) -> dict[Path, float]:
    """Microseconds by folder; says why one has none."""
    items: dict[Path, Item] = {}
    for folder, (candidate, build) in built.items():
        if build.status is BuildStatus.BUILT:
            gemm = row.gemm
            plan = contract.parse_cuda(candidate.source).plan(gemm, target.sms)
            items[folder] = Item(gemm.layout, build.artifact, pickle.dumps(plan), dependent=False)
        else:
            print(f"{row.gemm} {folder}: {build.reason}", file=sys.stderr)
    samples = dict(zip(items, timer.time(row.gemm, list(items.values())), strict=True))
    for folder, sample in samples.items():
        if sample.reason:
            print(f"{row.gemm} {folder}: {sample.reason}", file=sys.stderr)
    return {folder: sample.final[0] for folder, sample in samples.items()}


def table(found: Sequence[tuple[Row, float]]) -> str:
    """Geometric means by family and size."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, ratio in found:
        log2 = grid.log2_mnk(row.gemm)
        size = next(f"{low}-{high}" for low, high in BUCKETS if low <= log2 <= high)
        for key in ((row.family, size), (row.family, "all"), ("all", "all")):
            groups[key].append(ratio)
    lines = [
        "| family | log2(MNK) | kernels | geometric mean | median | least | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for (family, size), ratios in sorted(groups.items()):
        figures = geometric_mean(ratios), statistics.median(ratios), min(ratios), max(ratios)
        lines.append(f"| {family} | {size} | {len(ratios)} | " + " | ".join(f"{x:.4f}" for x in figures) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+", help="copies of cuda_l2/families")
    parser.add_argument("--table", type=Path, default=Path("results/h200/schedules.csv"))
    parser.add_argument("--sample", type=int, default=120, help="sizes, stratified")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cold", action="store_true", help="single launches with nothing cached")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends it as Ctrl-C does
    found: dict[Path, list[tuple[Row, float]]] = defaultdict(list)
    try:
        rows = read_table(options.table)
        edge = COLD if options.cold and any(row.edge == COLD for row in rows) else PLAIN
        chosen = sampled(rows, options.sample, options.seed, edge)
        folders = list(dict.fromkeys([ORIGINAL, *options.folders]))
        if missing := [str(folder) for folder in folders if not folder.is_dir()]:
            raise UserError(f"{missing[0]} is not a folder: give copies of {ORIGINAL}")
        kernels = counted(len(chosen) * len(folders), "kernel")
        print(f"{counted(len(chosen), 'shape')} to compare, {kernels} to build", file=sys.stderr, flush=True)
        with contextlib.closing(compare(chosen, folders, cuda.detect(), options.cold)) as compared:
            for number, (row, ratios) in enumerate(compared, 1):
                for folder, ratio in ratios.items():
                    found[folder].append((row, ratio))
                said = ", ".join(f"{folder} {ratio:.4f}" for folder, ratio in ratios.items()) or "not compared"
                print(f"{number} of {len(chosen)}: {row.gemm} {row.family}: {said}", file=sys.stderr, flush=True)
        status = 0
    except KeyboardInterrupt:
        print("interrupted: of what was compared so far", file=sys.stderr)
        status = 130
    except (UserError, MachineError, OSError) as error:
        print(error, file=sys.stderr)
        status = 2
    for folder, pairs in found.items():
        print(f"{folder}: times as fast as the original\n\n{table(pairs)}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
