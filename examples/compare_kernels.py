"""Times edited copies of the GPU families' sources beside the originals: is a change to a kernel worth it?

    cp -r cuda_l2/families /tmp/lean && $EDITOR /tmp/lean/sm90_wave.cu
    python examples/compare_kernels.py /tmp/lean --sample 120
    python examples/compare_kernels.py /tmp/lean /tmp/other --sample 60 --cold

For a sample of a dispatch table's shapes the kernel that serves each is built from every folder and timed,
interleaved, as `cuda-l2 select` does: plain launches back to back, or with --cold single ones with nothing cached.
Prints how many times as fast as the original each folder's are, by family and size. Needs an NVIDIA GPU of the table's
kind.
"""

import argparse
import math
import pickle
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from cuda_l2 import contract, grid
from cuda_l2.build.build_server import BuildServers
from cuda_l2.errors import UserError
from cuda_l2.execute.cuda_driver import bus_id
from cuda_l2.execute.lock import machine_lock
from cuda_l2.families._base import inlined
from cuda_l2.library.table import COLD, PLAIN, Row, family_of, read_table
from cuda_l2.measure.intervals import geometric_mean
from cuda_l2.measure.quick import Item, QuickTimer
from cuda_l2.records import Accumulate, BuildStatus, Candidate
from cuda_l2.report.library import BUCKETS
from cuda_l2.targets import cuda
from cuda_l2.targets.cuda import CudaTarget

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
) -> dict[Path, list[tuple[Row, float]]]:
    """By folder: how many times as fast as the first folder's each row's kernel is."""
    servers = BuildServers(target)
    try:
        candidates = {(row, folder): edited(row, target, folder) for row in rows for folder in folders}
        built = dict(zip(candidates, servers.build(list(candidates.values())), strict=True))
    finally:
        servers.close()
    found: dict[Path, list[tuple[Row, float]]] = defaultdict(list)
    with machine_lock(bus_id()), QuickTimer(0, FINALISTS, cold=cold) as timer:
        for row in rows:
            items, places = [], []
            for folder in folders:
                build = built[row, folder]
                if build.status is not BuildStatus.BUILT:
                    print(f"{row.gemm} {folder}: {build.reason}", file=sys.stderr)
                    continue
                gemm = row.gemm
                plan = contract.parse_cuda(candidates[row, folder].source).plan(gemm.m, gemm.n, gemm.k, target.sms)
                items.append(Item(gemm.layout, build.artifact, pickle.dumps(plan), dependent=False))
                places.append(folder)
            times = {}
            for folder, sample in zip(places, timer.time(row.gemm, items), strict=True):
                if sample.reason:
                    print(f"{row.gemm} {folder}: {sample.reason}", file=sys.stderr)
                times[folder] = sample.final[0]
            base = times.get(folders[0], math.nan)
            for folder in folders[1:]:
                if math.isfinite(base / times.get(folder, math.nan)):
                    found[folder].append((row, base / times[folder]))
    return found


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
    try:
        rows = read_table(options.table)
        edge = COLD if options.cold and any(row.edge == COLD for row in rows) else PLAIN
        chosen = sampled(rows, options.sample, options.seed, edge)
        found = compare(chosen, [ORIGINAL, *options.folders], cuda.detect(), options.cold)
    except UserError as error:
        parser.exit(2, f"{error}\n")
    for folder, ratios in found.items():
        print(f"{folder}: times as fast as the original\n\n{table(ratios)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
