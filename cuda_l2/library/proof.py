"""Which kernels of a table are proved: a file of verdicts, from which an interrupted run goes on, and a table.

A verdict holds for one text (kernel, contract and so the launch) at one shape on one machine, as long as what compiles
and what verifies have not changed.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.build.cuda_compiler import toolchain
from cuda_l2.library.kernels import INTERIOR, ProofTask, TableKernel
from cuda_l2.records import Build, BuildStatus, Gemm, Verdict, VerdictStatus, from_json, to_json
from cuda_l2.system.closing import Closing
from cuda_l2.system.files import csv_text
from cuda_l2.system.lines import LinesFile
from cuda_l2.system.paths import PACKAGE

PROOF, KERNELS = "proof.jsonl", "kernels.csv"
COLUMNS = (
    *("kernel", "family", "schedule", "layout", "accumulate", "rows", "registers", "shared_bytes"),
    *("interior", "interior_launch", "edge", "edge_launch", "checks", "verdict", "reason"),
)
VERIFIER = (
    *("build", "contract", "machine", "measure", "rigs", "tasks", "verify"),
    *("library/kernels.py", "runs/prover.py", "runs/prover_worker.py"),
)
"""The package's files that a verdict depends on."""
CORRECT = str(VerdictStatus.CORRECT)
DIED = "died"
"""Status where the process that verified did not answer."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome of one kernel at one shape."""

    kernel: str
    candidate: str  # its id: the kernel and its contract
    family: str
    schedule: str  # what is compiled
    role: str
    gemm: Gemm
    edge: str
    machine: str
    rules: str  # the version of what verified it
    status: str  # the build's, the verdict's, or 'died'
    check: str = ""  # the check that failed
    reason: str = ""
    passed: tuple[str, ...] = ()
    registers: int = 0
    shared_bytes: int = 0  # a block's, static and dynamic
    spill_bytes: int = 0
    seconds: float = 0.0  # of verification, without building and the sanitizer
    created: str = ""  # UTC, ISO 8601

    @property
    def correct(self) -> bool:
        return self.status == CORRECT


class ProofFile(Closing):
    """The verdicts of a machine and of this verifier, in a file that may hold others' too. A context manager."""

    def __init__(self, path: Path, machine: str) -> None:
        self.path, self.machine, self.rules = path, machine, rules_version()
        self._found: dict[tuple[str, Gemm], Proof] = {}
        self._file = LinesFile(path)
        for line in self._file.lines:
            try:
                self._keep(from_json(Proof, line.decode()))
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # damaged, or another version's: it is proved again

    def find(self, task: ProofTask) -> Proof | None:
        return self._found.get((task.candidate.id, task.gemm))

    def pending(self, tasks: Sequence[ProofTask]) -> list[ProofTask]:
        """What has no verdict yet. One that found a fault stays: a kernel with a rare race passes sooner or later."""
        found = [(task, self.find(task)) for task in tasks]
        return [task for task, proof in found if not proof or proof.status == DIED]

    def append(self, *proofs: Proof) -> None:
        """Store some; they are there after a kill once this returns."""
        self._file.append(*map(to_json, proofs))
        for proof in proofs:
            self._keep(proof)

    def take_over(self, path: Path) -> None:
        """Append another file's verdicts of what has none here, and its faults of what is correct here.

        UserError where another run is writing it.
        """
        with ProofFile(path, self.machine) as other:
            found = [(proof, self._found.get(key)) for key, proof in other._found.items()]
        self.append(*(theirs for theirs, ours in found if _weight(theirs) > _weight(ours)))

    def close(self) -> None:
        self._file.close()

    def _keep(self, proof: Proof) -> None:
        if (proof.machine, proof.rules) == (self.machine, self.rules):
            self._found[proof.candidate, proof.gemm] = proof


def _weight(proof: Proof | None) -> int:
    """Which of two verdicts on one kernel counts: a fault before none, and any before no answer."""
    if proof is None or proof.status == DIED:
        return 0
    return 1 if proof.correct else 2


@functools.cache
def rules_version() -> str:
    """Changes with the text of whatever verifies, and with the compiler."""
    files = sorted(path for name in VERIFIER for path in [PACKAGE / name, *(PACKAGE / name).rglob("*.*")])
    texts = [path.read_bytes() for path in files if path.is_file() and path.suffix != ".pyc"]
    return hashlib.sha256(b"".join([toolchain().version.encode(), *texts])).hexdigest()[:16]


def proof_of(task: ProofTask, machine: str, created: str, build: Build | None, outcome: Verdict | str) -> Proof:
    """A verdict, or in words why there is none, as a proof of its task."""
    built = build is not None and build.status is BuildStatus.BUILT
    kernels = build.kernels if build else ()
    verdict = outcome if isinstance(outcome, Verdict) else None
    return Proof(
        kernel=task.kernel.id,
        candidate=task.candidate.id,
        family=task.kernel.family.name,
        schedule=task.kernel.schedule,
        role=task.role,
        gemm=task.gemm,
        edge=task.edge,
        machine=machine,
        rules=rules_version(),
        status=str(verdict.status) if verdict else str(build.status) if build and not built else DIED,
        check=verdict.check if verdict else "",
        reason=outcome if isinstance(outcome, str) else outcome.reason,
        passed=verdict.passed if verdict else (),
        registers=max((kernel.registers for kernel in kernels), default=0),
        shared_bytes=max((kernel.shared_bytes for kernel in kernels), default=0) + task.dynamic_bytes,
        spill_bytes=sum(kernel.spill_bytes for kernel in kernels),
        seconds=round(verdict.seconds, 3) if verdict else 0.0,
        created=created,
    )


def kernels_csv(kernels: Sequence[TableKernel], tasks: Sequence[ProofTask], proofs: ProofFile) -> str:
    """One row a kernel, as CSV: what it is, where it was proved, by which checks, and the verdict."""
    rows = []
    for kernel in kernels:
        own = [task for task in tasks if task.kernel is kernel]
        rows.append(_fields(kernel, own, [proof for task in own if (proof := proofs.find(task))]))
    return csv_text(COLUMNS, rows)


def failures(tasks: Sequence[ProofTask], proofs: ProofFile) -> list[Proof]:
    """The verdicts that are not 'correct'."""
    return [proof for task in tasks if (proof := proofs.find(task)) and not proof.correct]


def _fields(kernel: TableKernel, tasks: Sequence[ProofTask], proofs: Sequence[Proof]) -> list[object]:
    wrong = [proof for proof in proofs if not proof.correct]
    verdict = wrong[0].status if wrong else CORRECT if len(proofs) == len(tasks) else "not proved yet"
    checks = [name for name in proofs[0].passed if all(name in proof.passed for proof in proofs)] if proofs else []
    places: list[object] = []
    for inside in (True, False):
        task = next((task for task in tasks if (task.role == INTERIOR) is inside), None)
        places += [task.gemm, task.edge] if task else ["", ""]
    return [
        *(kernel.id, kernel.family.name, kernel.schedule, kernel.layout, kernel.accumulate, len(kernel.rows)),
        *(proofs[0].registers if proofs else "", proofs[0].shared_bytes if proofs else ""),
        *(*places, "; ".join(checks), verdict, "; ".join(f"{proof.gemm}: {proof.reason}" for proof in wrong)),
    ]
