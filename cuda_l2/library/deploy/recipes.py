"""Which kernels the pack holds: each a family, a schedule and a shape for which the family writes it.

kernels.csv has one row a kernel, as a dispatch table has them: those of results/h200/schedules.csv with fp32 sums.
`shapes`: the shapes of that table which the kernel serves; `proof`: what `cuda-l2 prove` found for its family, schedule
and layout, and the kernel it proved, whose source may be an earlier one.
few_rows.csv has more of the same, for the layers of language models: what won in bf16 on results/h100/layers.
From each row follow the same in fp16 and bf16, and the kernels that the schedule gives where M ends with a tile and in
the middle of one. any_size.csv has those for sizes that are multiples of nothing, chosen on results/h100/random: where
its shape is the family's most general, so is the kernel. ahead.csv has kernels that read weights ahead, by
results/h100/ahead.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cuda_l2 import contract
from cuda_l2.families._base import Family, Schedule
from cuda_l2.library.kernels import kernels_of
from cuda_l2.library.table import COLUMNS, Row, family_of, read_times, schedule_text
from cuda_l2.machine.cuda.target import CudaTarget, compile_only
from cuda_l2.records import Accumulate, Candidate, Gemm
from cuda_l2.system.files import csv_text

KERNELS, FEW_ROWS, ANY_SIZE, AHEAD = (
    Path(__file__).with_name(name) for name in ("kernels.csv", "few_rows.csv", "any_size.csv", "ahead.csv")
)
FILES = KERNELS, FEW_ROWS, ANY_SIZE, AHEAD
ARCH = "sm_90a"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One kernel to be compiled."""

    id: str
    family: str
    schedule: tuple[tuple[str, int], ...]  # the compiled choices
    gemm: Gemm  # a shape that it serves
    candidate: Candidate
    shapes: int
    proof: str


def serving(family: Family, compiled: dict[str, int], gemm: Gemm, target: CudaTarget) -> Iterator[Candidate]:
    """The candidates of a schedule for a shape, with each launch that the family proposes, plain first.

    They are one kernel or several: what is compiled may depend on the shape.
    """
    if not family.serves(gemm, target):
        return
    seen = set()
    for launch in family.launches(gemm, target, compiled):
        for edge in (0, 1):
            for found in texts(family, {**compiled, **launch, "EDGE": edge}, gemm, target):
                if found.source not in seen:
                    seen.add(found.source)
                    yield found


def texts(family: Family, wanted: dict[str, int], gemm: Gemm, target: CudaTarget) -> list[Candidate]:
    """A schedule's candidates for a shape: the one made for it, and the one that serves the most others."""
    shapes = dict.fromkeys([gemm, family.general(gemm, wanted)])
    return [made for shape in shapes if (made := candidate(family, wanted, shape, target))]


def named(family: Family, wanted: dict[str, int], gemm: Gemm, target: CudaTarget, kernel: str) -> Candidate | None:
    """The one of a schedule's candidates whose kernel has this id."""
    made = texts(family, wanted, gemm, target)
    return next((each for each in made if contract.kernel_id(each.source) == kernel), None)


def candidate(family: Family, wanted: dict[str, int], gemm: Gemm, target: CudaTarget) -> Candidate | None:
    """A schedule's candidate; None where its compiled choices are not valid. Other choices give way."""
    if not family.serves(gemm, target):
        return None
    values: list[int] = []
    for choice in family.choices:
        value = wanted.get(choice.name)
        if value is None or not family.takes(gemm, target, tuple(values), value):
            if value is not None and choice.compiled:
                return None
            value = family.valid_values(gemm, target, values)[0]
        values.append(value)
    return family.render(Schedule(family, gemm, target, tuple(values)), "table")


def recipes(*files: Path) -> list[Recipe]:
    """Every kernel of the pack, or of these files, each once; UserError where a file cannot be read."""
    target, found, told = compile_only(ARCH), dict[str, Recipe](), dict[Row, tuple[int, str]]()
    for path in files or FILES:
        told |= evidence(path)
    for row in told:
        family, gemm = family_of(row.family), row.gemm
        compiled = {name: value for name, value in row.schedule if name in family.compiled}
        for shape in _shapes(family, compiled, gemm):
            for dtype in ("float16", "bfloat16"):
                typed = replace(shape, dtype=dtype)
                made = candidate(family, dict(row.schedule), typed, target)
                if made is None:
                    continue
                name = contract.kernel_id(made.source)
                shapes, proof = told[row] if typed == gemm else (0, "")
                recipe = Recipe(name, family.name, tuple(compiled.items()), typed, made, shapes, proof)
                found.setdefault(name, recipe)
    return list(found.values())


def _shapes(family: Family, compiled: dict[str, int], gemm: Gemm) -> list[Gemm]:
    """Shapes with kernels of their own: M ends with a tile or in the middle of one, unless one kernel serves all."""
    tile = compiled["BN" if compiled.get("SWAP") else "BM"]
    whole = -(-gemm.m // tile) * tile
    shapes = [replace(gemm, m=m) for m in (gemm.m, gemm.m - 1, whole, whole - 1) if m]
    if family.general(gemm, compiled) == gemm:
        shapes = [family.general(shape, compiled) for shape in shapes]
    return list(dict.fromkeys(shapes))


def distinct(rows: Iterable[Row], proofs: Path) -> str:
    """kernels.csv for a table: one row a kernel with fp32 sums. proofs: the kernels.csv of `cuda-l2 prove`."""
    wanted = [row for row in rows if row.gemm.accumulate is Accumulate.FP32]
    with proofs.open() as file:
        proved = {(row["family"], row["schedule"], row["layout"]): row for row in csv.DictReader(file)}
    lines = []
    for kernel in kernels_of(wanted, compile_only(ARCH)):
        row, gemm = kernel.rows[0], kernel.rows[0].gemm
        proof = proved.get((row.family, kernel.schedule, gemm.layout))
        said = f"{proof['verdict']} ({proof['kernel']})" if proof else ""
        shape = gemm.m, gemm.n, gemm.k, gemm.layout, gemm.accumulate, row.edge
        text = schedule_text(row.schedule)
        lines.append((*shape, row.family, text, f"{row.us:.3f}", len({each.gemm for each in kernel.rows}), said))
    return csv_text((*COLUMNS, "shapes", "proof"), lines)


def evidence(path: Path) -> dict[Row, tuple[int, str]]:
    """The rows of one of these files, each with its `shapes` and its `proof`."""
    with path.open() as file:
        fields = [(int(row.get("shapes") or 0), row.get("proof") or "") for row in csv.DictReader(file)]
    return dict(zip(read_times(path), fields, strict=True))
