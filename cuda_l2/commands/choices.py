"""cuda-l2 choices: whether the algorithms that cuBLASLt's autotuning chose are still the best of all returned."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2.commands._options import end_interrupted, member, require_writable
from cuda_l2.records import Accumulate, Gemm
from cuda_l2.system.errors import UserError


def command(
    *,
    grid: str = "paper",
    sample: int | None = None,
    accumulate: str = "fp32",
    choices: Path | None = None,
    out: Path = Path("choices.csv"),
    seed: int = 0,
    fresh: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Time every algorithm that cuBLASLt's heuristic returned for a shape again, interleaved, beside the one chosen.

    The baseline of every speedup is the choice, so a wrong one would flatter us. Prints how many are within 1 % of the
    best by size, and writes one row a shape and layout. An interrupted run goes on from the .jsonl file beside --out.

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
    fresh
        Move the results that are there aside and begin anew.
    """
    kind = member(Accumulate, accumulate, "accumulator")
    from cuda_l2.runs import grid as grids

    gemms = grids.read_grid(grid, accumulate=kind)
    gemms = grids.shuffled(grids.sample(gemms, sample, seed) if sample else gemms, seed)
    kept = out.with_suffix(".jsonl")
    if kept == out:
        raise UserError(f"{out} is where an interrupted run goes on from: give --out another ending, as .csv")
    require_writable(out)

    _audit(gemms, choices, out, kept, fresh)


def _audit(gemms: Sequence[Gemm], choices: Path | None, out: Path, kept: Path, fresh: bool) -> None:
    """Audit what `kept` does not hold yet, and write and print all that it holds then."""
    import cuda_l2
    from cuda_l2.report.grid import write_text
    from cuda_l2.report.grid_live import GridProgress
    from cuda_l2.rigs import open_rig
    from cuda_l2.runs.choice_audit import KIND, ROUNDS, AuditFile, audit, rows_csv, table
    from cuda_l2.runs.run_file import Header
    from cuda_l2.system import lines
    from cuda_l2.system.lock import machine_lock

    finished = False
    with open_rig("cuda") as rig:
        settings: dict[str, object] = {"rounds": ROUNDS, "choices": "of the cache"}
        if choices:
            rig.recall_choices(choices, gemms)
            settings["choices"] = hashlib.sha256(choices.read_bytes()).hexdigest()[:16]
        if fresh:
            lines.set_aside(out.parent, kept.name, out.name)
        environment = rig.environment() | {"cuda_l2": cuda_l2.__version__}
        with AuditFile(kept, Header(rig.target.machine, environment, settings, kind=KIND)) as audits:
            pending = audits.pending(gemms)
            try:
                with GridProgress(len(gemms), len(gemms) - len(pending)) as line:
                    for gemm in pending:
                        line.stage(gemm, "timing")
                        rig.require_feasible(gemm)
                        with machine_lock(rig.gpu):
                            audits.append(audit(rig.baselines, gemm))  # type: ignore[attr-defined] # a CudaRig's
                        line.done(gemm)
                finished = True
            except KeyboardInterrupt:
                pass
            finally:  # also where an error ends the run
                write_text(out, rows_csv(audits.choices))
    if audits.choices:
        print(table(audits.choices))
    if not finished:
        end_interrupted()
