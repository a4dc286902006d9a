"""Machine code of every kernel of a dispatch table, compared with what was recorded; no GPU is needed.

    python tests/machine_code.py             # compile all kernels of the table and compare
    python tests/machine_code.py --write     # record the ids of kernels whose text changed and whose code did not

results/h200/machine-code.csv has one row a kernel of results/h200/schedules.csv, found by the first row of the table
that uses it (`gemm`, `edge`, `family`). `proved_as` is the kernel's id in results/h200/proof/kernels.csv and in runs of
that time, `kernel` its id now: the file maps one to the other. `machine_code` hashes the instructions, registers, parameters
and shared memory of each function in the cubin that NVRTC makes for sm_90a. Comments, names and the division into
files do not enter it. Rows are compared under the compiler they were recorded with, NVRTC below.
results/h200/proof/machine-code.csv has the same for the pack's other kernels whose text changed after they had been
proved, in results/h200/proof or results/h100/proof.
"""

import argparse
import csv
import hashlib
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from cuda_l2 import contract
from cuda_l2.build import cubin
from cuda_l2.build.cuda_compiler import compile_source, toolchain
from cuda_l2.library.deploy.recipes import AHEAD, ANY_SIZE, FEW_ROWS
from cuda_l2.library.table import Row, read_table
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import BuildStatus, Gemm

NVRTC = "13.0.88"
TARGET = compile_only("sm_90a")
RESULTS = Path(__file__).resolve().parent.parent / "results"
TABLE, RECORDED = RESULTS / "h200" / "schedules.csv", RESULTS / "h200" / "machine-code.csv"
PACK = RESULTS / "h200" / "proof" / "machine-code.csv"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One line of the file."""

    gemm: str
    edge: str
    family: str
    proved_as: str
    kernel: str
    machine_code: str


def recorded(path: Path = RECORDED) -> list[Recorded]:
    """The lines of a machine-code.csv."""
    with path.open(newline="") as file:
        return [Recorded(**line) for line in csv.DictReader(file)]


def pack_rows() -> list[Row]:
    """The rows that a line of PACK may be of: those of the pack that are not the table's."""
    return [row for path in (FEW_ROWS, AHEAD, ANY_SIZE) for row in read_table(path)]


def kernels(rows: Iterable[Row]) -> Iterator[tuple[Row, str, str]]:
    """The first row that uses each kernel, with the kernel's id and its source."""
    found: set[str] = set()
    for row in rows:
        source = row.candidate(TARGET).source
        kernel = contract.kernel_id(source)
        if kernel not in found:
            found.add(kernel)
            yield row, kernel, source


def machine_code(source: str) -> str:
    """Hash, 16 hex digits, of all that the GPU executes of a source."""
    compiled = compile_source(contract.code(source), TARGET.arch, toolchain(), with_cutlass=False)
    assert compiled.status is BuildStatus.BUILT, compiled.reason
    words = hashlib.sha256()
    for kernel, facts in _functions(compiled.cubin, compiled.log):
        words.update(f"{kernel.name} {kernel.registers} {kernel.parameters} {facts.shared_bytes}\0".encode())
        words.update(b"".join(kernel.words))
    return words.hexdigest()[:16]


def _functions(code: bytes, log: str) -> Iterator[tuple[cubin.Kernel, cubin.KernelFacts]]:
    read = cubin.read(code)
    text = {word: "" for kernel in read.kernels for word in kernel.words}
    return zip(read.kernels, cubin.facts(read, text, log), strict=True)


def compare(lines: Iterable[Recorded], table: Iterable[Row], cores: int = 2) -> list[Recorded]:
    """The lines with the ids and the machine code that the kernels of the table have now."""
    rows = {(row.gemm, row.edge, row.family): row for row in table}
    sources = [rows[Gemm.parse(line.gemm), line.edge, line.family].candidate(TARGET).source for line in lines]
    with ThreadPoolExecutor(cores) as pool:
        codes = list(pool.map(machine_code, sources))
    ids = [contract.kernel_id(source) for source in sources]
    return [
        replace(line, kernel=kernel, machine_code=code) for line, kernel, code in zip(lines, ids, codes, strict=True)
    ]


def write(lines: Iterable[Recorded], path: Path = RECORDED) -> None:
    """Replace a file."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Recorded)])
        writer.writerows(map(astuple, lines))


def _started(table: Iterable[Row]) -> list[Recorded]:
    """A line for every kernel of the table, before anything is compiled."""
    return [Recorded(str(row.gemm), row.edge, row.family, kernel, kernel, "") for row, kernel, _ in kernels(table)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record the kernels' new ids where the code is the same")
    arguments = parser.parse_args()
    version = toolchain().version
    if version != NVRTC:
        sys.exit(f"NVRTC {version} is installed; the machine code was recorded with {NVRTC}")
    table = read_table(TABLE)
    old = recorded() if RECORDED.exists() else _started(table)
    new = compare(old, table)
    pack = recorded(PACK)
    pack_now = compare(pack, pack_rows())
    both = zip([*old, *pack], [*new, *pack_now], strict=True)
    different = [line for line, now in both if line.machine_code not in ("", now.machine_code)]
    for line in different:
        print(f"other machine code: {line.gemm} {line.edge}, proved as {line.proved_as}")
    unknown = {kernel for _, kernel, _ in kernels(table)} ^ {line.kernel for line in new}
    print(f"{len(new) + len(pack_now)} kernels, {len(different)} with other machine code, {len(unknown)} of other rows")
    if arguments.write and not different and not unknown:
        write(new)
        write(pack_now, PACK)
    return bool(different or unknown)


if __name__ == "__main__":
    sys.exit(main())
