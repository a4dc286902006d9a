"""cuda-l2 prove: full verification of every distinct kernel of a library table."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cuda_l2.commands._options import end_interrupted, part, require_cuda_packages, require_writable, tell
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import counted

if TYPE_CHECKING:
    from cuda_l2.library.kernels import ProofTask
    from cuda_l2.library.proof import ProofFile
    from cuda_l2.machine.cuda.target import CudaTarget


def command(
    table: Path,
    /,
    *,
    out: Path = Path("proof"),
    jobs: int | None = None,
    fresh: Annotated[bool, Parameter(negative=())] = False,
    part_: Annotated[str, Parameter(name="--part")] = "1/1",
    workers: str = "",
) -> None:
    """Verify every distinct kernel of a table in full, sanitizers and stress builds included, at two shapes.

    One shape lies inside what the kernel is made for, one at an edge. Writes proof.jsonl, from which an interrupted run
    goes on, and kernels.csv. Exits with 1 where a kernel is not correct.

    Args:
        table: CSV file of kernels by shape, as `cuda-l2 select` writes it.
        out: Folder for the results.
        jobs: Kernels verified at once; by default one for every three cores.
        fresh: Move the results that --out holds aside and begin anew.
        part_: Prove only this part of the kernels, as in 1/2.
        workers: Several GPUs, a process each: auto for all of this machine, or how many; ray://HOST:PORT for those of a
            Ray cluster, ray for one that is started here (docs/scale.md).
    """
    from cuda_l2.library.proof import PROOF
    from cuda_l2.library.table import read_table

    rows = read_table(table)
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {jobs}")
    number, count = part(part_)
    require_writable(out / PROOF)
    require_cuda_packages()

    from cuda_l2.library.kernels import kernels_of, tasks_for
    from cuda_l2.library.proof import KERNELS, ProofFile, failures, kernels_csv
    from cuda_l2.machine.cuda.target import detect
    from cuda_l2.runs.prover import require_sanitizer
    from cuda_l2.system import lines

    target = detect()
    require_sanitizer()
    kernels = kernels_of(rows, target)[number - 1 :: count]
    if workers and (count > 1 or fresh):
        raise UserError(
            "--workers gives each GPU its part, and goes on from what is there: leave --part and --fresh out"
        )
    _take_over(out, target)  # the number of parts may be another now
    if workers:
        _by_workers(workers, out, target, jobs)
        _take_over(out, target)
    tasks = [task for kernel in kernels for task in tasks_for(kernel, target)]
    if fresh:
        lines.set_aside(out, PROOF, KERNELS)
    with ProofFile(out / PROOF, target.machine) as proofs:
        try:
            finished = _prove(tasks, proofs, target, jobs)
        finally:  # also where an error ends the run
            (out / KERNELS).write_text(kernels_csv(kernels, tasks, proofs))
        left, wrong = len(proofs.pending(tasks)), failures(tasks, proofs)
    for proof in wrong:
        print(f"{proof.family} {proof.kernel} at {proof.gemm}, {proof.edge}: {proof.status}: {proof.reason}")
    there = f"{counted(len(kernels), 'kernel')}, {len(tasks) - left} of {counted(len(tasks), 'proof')} done"
    print(f"{there}; {out / KERNELS} lists them")
    if not finished:
        end_interrupted()
    sys.exit(1 if wrong else 0)


def _take_over(out: Path, target: "CudaTarget") -> None:
    """Add the verdicts of parts, if there are any."""
    from cuda_l2.library.proof import PROOF, ProofFile
    from cuda_l2.runs import parts

    if any(out.glob(f"gpu-*/{PROOF}")):
        with ProofFile(out / PROOF, target.machine) as proofs:
            parts.take_over(out, PROOF, proofs.take_over)


def _by_workers(asked: str, out: Path, target: "CudaTarget", jobs: int | None) -> None:
    """Have every GPU prove its part of the kernels. GPUs of one machine share its cores."""
    from cuda_l2.library.proof import PROOF
    from cuda_l2.runs import on_ray, parts
    from cuda_l2.runs.prover import CORES_A_WORKER

    def changed(count: int) -> dict[str, str]:
        if jobs or on_ray.is_ray(asked):  # how many GPUs a node of a cluster has is not known here
            return {}
        return {"--jobs": str(max(1, target.cores // CORES_A_WORKER // count))}

    # one that found a fault ends with 1, and is done
    parts.share(asked, out, PROOF, tell, changed, ended=(0, 1))


def _prove(tasks: "list[ProofTask]", proofs: "ProofFile", target: "CudaTarget", jobs: int | None) -> bool:
    """Prove what is pending, several kernels at once; False where an interrupt ended it."""
    from cuda_l2.library.proof import Proof
    from cuda_l2.machine.cuda.driver import bus_id
    from cuda_l2.report.live import GridProgress
    from cuda_l2.runs.prover import CORES_A_WORKER, Prover
    from cuda_l2.system.lock import machine_lock

    pending = proofs.pending(tasks)
    line = GridProgress(len(tasks), len(tasks) - len(pending), "proof")

    def keep(proof: Proof) -> None:
        proofs.append(proof)
        line.done(f"{proof.kernel} at {proof.gemm}")

    with contextlib.suppress(KeyboardInterrupt), machine_lock(bus_id()), line:
        with Prover(target, jobs or max(1, target.cores // CORES_A_WORKER)) as prover:
            prover.run(pending, keep)
        return True
    return False
