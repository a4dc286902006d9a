"""cuda-l2 choices: whether the algorithms that cuBLASLt's autotuning chose are still the best of all returned."""

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from cuda_l2.commands._options import end_interrupted, require_writable
from cuda_l2.records import Accumulate
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_text
from cuda_l2.system.values import member


@Parameter(name="*", negative=())
@dataclass(frozen=True)
class ChoicesSettings:
    """Which choices to time again."""

    grid: str = "paper"
    """Shapes: paper, a file of shapes, or shapes as in 64x64x64,128x128x128."""
    sample: int | None = None
    """Number of them to take, stratified by size."""
    accumulate: str = "fp32"
    """fp32 or fp16."""
    choices: Path | None = None
    """File of choices that `cuda-l2 bench --choices` wrote; what it does not have is chosen first."""
    out: Path = Path("choices.csv")
    """CSV file."""
    seed: int = 0
    """Seed of the sample."""
    fresh: bool = False
    """Move the results that are there aside and begin anew."""


def command(*, settings: ChoicesSettings = ChoicesSettings()) -> None:
    """Time every algorithm that cuBLASLt's heuristic returned for a shape again, interleaved, beside the one chosen.

    The baseline of every speedup is the choice, so a wrong one would flatter us. Prints how many are within 1 % of the
    best by size, and writes one row a shape and layout. An interrupted run goes on from the .jsonl file beside --out.
    """
    kind = member(Accumulate, settings.accumulate, "accumulator")
    from cuda_l2.runs import grid as grids

    gemms = grids.chosen(grids.read_grid(settings.grid, accumulate=kind), settings.sample, settings.seed)
    out = settings.out
    kept = out.with_suffix(".jsonl")
    if kept == out:
        raise UserError(f"{out} is where an interrupted run goes on from: give --out another ending, as .csv")
    if settings.choices and not settings.choices.exists():
        raise UserError(f"{settings.choices} is not there: give a file that `cuda-l2 bench --choices` wrote")
    require_writable(out)

    import cuda_l2
    from cuda_l2.report.live import GridProgress
    from cuda_l2.rigs import Request, open_rig
    from cuda_l2.runs.choice_audit import KIND, ROUNDS, AuditFile, audit, rows_csv, table
    from cuda_l2.runs.run_file import Header
    from cuda_l2.system import lines
    from cuda_l2.system.lock import machine_lock

    finished, choices = False, settings.choices
    with open_rig("cuda", Request(choices=choices)) as rig:
        fixed: dict[str, object] = {"rounds": ROUNDS, "choices": "of the cache"}
        if choices:
            fixed["choices"] = hashlib.sha256(choices.read_bytes()).hexdigest()[:16]
        if settings.fresh:
            lines.set_aside(out.parent, kept.name, out.name)
        environment = rig.environment() | {"cuda_l2": cuda_l2.__version__}
        with AuditFile(kept, Header(rig.target.machine, environment, fixed, kind=KIND)) as audits:
            pending = audits.pending(gemms)
            try:
                with (
                    contextlib.suppress(KeyboardInterrupt),
                    GridProgress(len(gemms), len(gemms) - len(pending)) as line,
                ):
                    for gemm in pending:
                        line.stage(gemm, "timing")
                        rig.require_feasible(gemm)
                        with machine_lock(rig.gpu):
                            audits.append(audit(rig.libraries, gemm))  # type: ignore[attr-defined] # a CudaRig's
                        line.done(gemm)
                    finished = True
            finally:  # also where an error ends the run
                write_text(out, rows_csv(audits.choices))
    if audits.choices:
        print(table(audits.choices))
    if not finished:
        end_interrupted()
