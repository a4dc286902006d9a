"""The dispatch table: which schedule serves a shape, and how fast it was measured. One CSV file a machine.

Columns: m, n, k, layout, accumulate, edge, family, schedule, us, dtype. edge is how the kernel is launched and timed:
plain or programmatic, back to back; or cold, plainly and alone with none of its operands cached, as on a server. The
schedule is written as `BM=128 BN=64 ...`, every choice of the family by name. A table without the column dtype is of
float16. A pool, the kernels to choose from, is a file with the columns layout (empty: either), family and schedule, the
latter without the choices that are arguments of the launch.
"""

import csv
import gzip
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.families._base import Family, Schedule, all_families
from cuda_l2.machine._base import Target
from cuda_l2.records import Accumulate, Candidate, Gemm, Layout
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import csv_text, write_text

PLAIN, PROGRAMMATIC, COLD = EDGES = ("plain", "programmatic", "cold")
COLUMNS = ("m", "n", "k", "layout", "accumulate", "edge", "family", "schedule", "us")
POOL_COLUMNS = ("layout", "family", "schedule")

Named = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule for one shape under one edge."""

    gemm: Gemm
    edge: str
    family: str
    schedule: Named
    us: float

    def candidate(self, target: Target) -> Candidate:
        """The kernel with its contract; UserError where the family does not take the schedule here."""
        family = family_of(self.family)
        try:
            values = family.values(dict(self.schedule))
            return family.render(Schedule(family, self.gemm, target, values), "table")
        except ValueError as error:
            raise UserError(f"{self.gemm}: {self.family} does not take this schedule: {error}") from None

    @property
    def text(self) -> str:
        return schedule_text(self.schedule)


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A kernel that any shape may use for which it is valid: its compiled choices."""

    family: str
    schedule: Named
    layout: Layout | None = None


def family_of(name: str) -> Family:
    """A family by name; UserError where there is none."""
    for family in all_families():
        if family.name == name:
            return family
    raise UserError(f"there is no family {name!r}; choose from {', '.join(family.name for family in all_families())}")


def schedule_text(schedule: Iterable[tuple[str, int]]) -> str:
    return " ".join(f"{name}={value}" for name, value in schedule)


def schedule_of(text: str) -> Named:
    """`BM=128 BN=64` as pairs; ValueError where it is none."""
    pairs = [item.split("=") for item in text.split()]
    named = {name: int(value) for name, value in pairs}  # ValueError also where a pair is none
    if not named or len(named) != len(pairs):
        raise ValueError("a schedule is written as NAME=number NAME=number, each name once")
    return tuple(named.items())


def read_table(path: Path) -> list[Row]:
    """The rows of a table, one a shape and edge; UserError with file and line where one cannot be."""
    rows: dict[tuple[Gemm, str], Row] = {}
    for where, row in _located(path):
        if (row.gemm, row.edge) in rows:
            raise UserError(f"{where}: {row.gemm} {row.edge} has a row already")
        rows[row.gemm, row.edge] = row
    return list(rows.values())


def read_times(path: Path) -> list[Row]:
    """The rows of a file like a table, but with any number of schedules a shape."""
    return [row for _, row in _located(path)]


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Replace the file at once."""
    write_text(path, csv_text((*COLUMNS, "dtype"), [_fields(row) for row in rows]))


def joined(rows: Iterable[Row], newer: Iterable[Row]) -> list[Row]:
    """Both tables' rows in order; the newer's where both have one for a shape and edge."""
    found = {(row.gemm, row.edge): row for row in (*rows, *newer)}
    return sorted(found.values(), key=lambda row: (row.gemm, row.edge))


def read_pool(path: Path) -> list[PoolRow]:
    """The kernels of a pool, each once; UserError with file and line where a row cannot be."""
    rows: dict[PoolRow, None] = {}
    for where, fields in _lines(path, POOL_COLUMNS):
        try:
            layout = Layout(fields["layout"]) if fields["layout"] else None
            row = PoolRow(fields["family"], schedule_of(fields["schedule"]), layout)
            compiled = set(family_of(row.family).compiled)
        except (ValueError, UserError) as error:
            raise UserError(f"{where}: {error}") from None
        wrong = sorted(compiled ^ {name for name, _ in row.schedule})
        if wrong:
            raise UserError(f"{where}: a pool row names each compiled choice of {row.family} once; see {wrong[0]}")
        rows[row] = None
    if not rows:
        raise UserError(f"{path} holds no kernel")
    return list(rows)


def pool_of(rows: Iterable[Row]) -> list[PoolRow]:
    """The kernels that a table uses, each once a layout."""
    found: dict[PoolRow, None] = {}
    for row in rows:
        compiled = family_of(row.family).compiled
        schedule = tuple((name, value) for name, value in row.schedule if name in compiled)
        found[PoolRow(row.family, schedule, row.gemm.layout)] = None
    return list(found)


def write_pool(path: Path, rows: Iterable[PoolRow]) -> None:
    lines = [(row.layout or "", row.family, schedule_text(row.schedule)) for row in rows]
    write_text(path, csv_text(POOL_COLUMNS, lines))


def _located(path: Path) -> Iterator[tuple[str, Row]]:
    for where, fields in _lines(path, COLUMNS):
        try:
            yield where, _row(fields)
        except (ValueError, UserError) as error:
            raise UserError(f"{where}: {error}") from None


def _row(fields: Mapping[str, str]) -> Row:
    m, n, k = (int(fields[name]) for name in ("m", "n", "k"))
    edge, us = fields["edge"], float(fields["us"])
    if edge not in EDGES:
        raise ValueError(f"edge must be one of {', '.join(EDGES)}, not {edge!r}")
    if not 0 < us < float("inf"):
        raise ValueError(f"us must be a time, not {us}")
    dtype = fields.get("dtype") or "float16"
    gemm = Gemm(m, n, k, Layout(fields["layout"]), Accumulate(fields["accumulate"]), dtype)
    return Row(gemm, edge, family_of(fields["family"]).name, schedule_of(fields["schedule"]), us)


def _fields(row: Row) -> tuple[object, ...]:
    gemm = row.gemm
    size = gemm.m, gemm.n, gemm.k
    return *size, gemm.layout, gemm.accumulate, row.edge, row.family, row.text, f"{row.us:.3f}", gemm.dtype


def _lines(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """Every line's fields, with the place it was read from. A name that ends in .gz is a compressed file."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    reader = csv.DictReader(io.StringIO(text))
    if not set(columns) <= set(reader.fieldnames or ()):
        raise UserError(f"{path}: the first line must name the columns {', '.join(columns)}")
    for fields in reader:
        where = f"{path}, line {reader.line_num}"
        if any(fields[name] is None for name in columns):
            raise UserError(f"{where}: too few fields")
        yield where, fields
