"""cuda-l2 choices: whether the algorithms that cuBLASLt's autotuning chose are still the best of all returned."""

from pathlib import Path

from cuda_l2.commands._options import require_writable
from cuda_l2.errors import UserError
from cuda_l2.records import Accumulate


def command(
    *,
    grid: str = "paper",
    sample: int | None = None,
    accumulate: str = "fp32",
    choices: Path | None = None,
    out: Path = Path("choices.csv"),
    seed: int = 0,
) -> None:
    """Time every algorithm that cuBLASLt's heuristic returned for a shape again, interleaved, beside the one chosen.

    The baseline of every speedup is the choice, so a wrong one would flatter us. Prints how many are within 1 % of the
    best by size, and writes one row a shape and layout.

    Parameters
    ----------
    grid
        Shapes: paper, a file of shapes, or shapes as in 64x64x64,128x128x128.
    sample
        So many of them, stratified by size.
    accumulate
        fp32 or fp16.
    choices
        File of choices that `cuda-l2 bench --choices` wrote; what it does not have is chosen first.
    out
        CSV file.
    seed
        Of the sample.
    """
    try:
        kind = Accumulate(accumulate)
    except ValueError:
        raise UserError(f"there is no accumulator {accumulate!r}; choose from {', '.join(Accumulate)}") from None
    from cuda_l2 import grid as grids

    gemms = grids.read_grid(grid, accumulate=kind)
    gemms = grids.shuffled(grids.sample(gemms, sample, seed) if sample else gemms, seed)
    require_writable(out)

    import csv

    from cuda_l2.execute.lock import machine_lock
    from cuda_l2.measure.choice_audit import COLUMNS, Audited, audit, table
    from cuda_l2.report.grid_live import GridProgress
    from cuda_l2.rigs import open_rig

    found: list[Audited] = []
    with open_rig("cuda") as rig, GridProgress(len(gemms), 0) as line, out.open("w", newline="") as file:
        if choices:
            rig.recall_choices(choices)
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for gemm in gemms:
            line.stage(gemm, "timing")
            rig.require_feasible(gemm)
            with machine_lock(rig.gpu):
                audited = audit(rig.baselines, gemm)  # type: ignore[attr-defined] # a CudaRig's
            writer.writerows(each.row() for each in audited)
            file.flush()
            found += audited
            line.done(gemm)
    print(table(found))
