"""Times edited copies of the GPU families beside the originals: is a change to a kernel worth it?

    cp -r cuda_l2/families /tmp/lean && $EDITOR /tmp/lean/sm90_wave.cu /tmp/lean/sm90_wave.py
    python examples/compare_kernels.py /tmp/lean --sample 120
    python examples/compare_kernels.py /tmp/lean /tmp/other --sample 60 --edge cold

For a sample of a dispatch table's shapes the kernel that serves each is rendered by every folder, contract and source,
and timed, interleaved, as `cuda-l2 select` does: launches back to back, plain or as dependents, or single ones with
nothing cached. Prints how many times as fast as the original each folder's are, shape by shape as it goes, then by
family and size: of what was compared, where Ctrl-C or a time limit ends it. 400 rows of five folders took 40 s beside
16 cores. Needs an NVIDIA GPU of the table's kind.
"""

import argparse
import contextlib
import itertools
import math
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from cuda_l2 import contract
from cuda_l2.build.build_server import BuildServers
from cuda_l2.contract.cuda import Plan
from cuda_l2.library.table import COLD, EDGES, PLAIN, Row, read_table
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


RENDER = """
import pickle, sys
rows, target = pickle.load(sys.stdin.buffer)
pickle.dump([row.candidate(target) for row in rows], sys.stdout.buffer)
"""


def edited(rows: Sequence[Row], target: CudaTarget, folder: Path) -> list[Candidate]:
    """The rows' kernels as the families of another folder render them, by a process that imports these."""
    package = ORIGINAL.parent
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / package.name
        copy.mkdir()
        for entry in package.iterdir():
            (copy / entry.name).symlink_to(folder.resolve() if entry == ORIGINAL else entry)
        command = [sys.executable, "-B", "-c", RENDER]
        paths = [place, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        asked = pickle.dumps((list(rows), target))
        done = subprocess.run(command, input=asked, capture_output=True, env=environment, cwd=place, check=False)
    if done.returncode:
        raise UserError(f"{folder} does not render a row: {done.stderr.decode().strip().splitlines()[-1]}")
    found: list[Candidate] = pickle.loads(done.stdout)  # our own child's
    return found


def planned(row: Row, candidate: Candidate, target: CudaTarget, folder: Path) -> Plan:
    """The launches of a rendered row, before anything is built or timed."""
    try:
        return contract.parse_cuda(candidate.source).plan(row.gemm, target.sms)
    except contract.ContractError as error:
        raise UserError(f"{folder}, {row.gemm}, {row.family}: {error}") from None


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
    by_folder = [edited(rows, target, folder) for folder in folders]
    candidates = list(zip(*by_folder, strict=True))
    plans = [
        [planned(row, candidate, target, folder) for candidate, folder in zip(own, folders, strict=True)]
        for row, own in zip(rows, candidates, strict=True)
    ]
    servers = BuildServers(target)
    try:
        builds = servers.build(list(itertools.chain(*candidates)))
        with machine_lock(bus_id()), QuickTimer(0, FINALISTS, cold=cold) as timer:
            for row, own in zip(rows, plans, strict=True):
                built = zip(own, itertools.islice(builds, len(own)), strict=True)
                times = _times(row, dict(zip(folders, built, strict=True)), timer)
                base = times.get(folders[0], math.nan)
                ratios = {folder: base / us for folder, us in times.items() if folder != folders[0]}
                yield row, {folder: ratio for folder, ratio in ratios.items() if math.isfinite(ratio)}
    finally:
        servers.close()


def _times(row: Row, built: Mapping[Path, tuple[Plan, Build]], timer: QuickTimer) -> dict[Path, float]:
    """Microseconds by folder, launched as the row says; says why one has none."""
    items: dict[Path, Item] = {}
    for folder, (plan, build) in built.items():
        if build.status is BuildStatus.BUILT:
            items[folder] = Item(row.gemm.layout, build.artifact, pickle.dumps(plan), dependent=False)
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
    parser.add_argument("--edge", choices=EDGES, default=PLAIN, help="rows of the table, and how they are launched")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit ends it as Ctrl-C does
    found: dict[Path, list[tuple[Row, float]]] = defaultdict(list)
    try:
        chosen = sampled(read_table(options.table), options.sample, options.seed, options.edge)
        folders = list(dict.fromkeys([ORIGINAL, *options.folders]))
        if missing := [str(folder) for folder in folders if not folder.is_dir()]:
            raise UserError(f"{missing[0]} is not a folder: give copies of {ORIGINAL}")
        kernels = counted(len(chosen) * len(folders), "kernel")
        print(f"{counted(len(chosen), 'shape')} to compare, {kernels} to build", file=sys.stderr, flush=True)
        with contextlib.closing(compare(chosen, folders, cuda.detect(), options.edge == COLD)) as compared:
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
