"""Reads folders of results, single files and archives into the records of a page; files of other kinds are left out."""

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuda_l2.archive import Archive
from cuda_l2.records import Task, Trial, from_json
from cuda_l2.report import grid
from cuda_l2.report.page import models, rows, searchers
from cuda_l2.report.page.records import Found, Origin, Proof, Search, Sheet, Training, Verification
from cuda_l2.runs.results import CSV, ENVIRONMENT, PARQUET, RESULTS, Header, Measurement
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported, read_text
from cuda_l2.system.place import Place

SQLITE = b"SQLite format 3\0"
BENCH, TRAINING = "cuda-l2 bench", "cuda-l2 train"
PROVED = frozenset(("kernel", "interior", "edge", "checks", "verdict"))
"""Columns of `cuda-l2 prove`'s table."""
KNOWN = (
    f"{CSV}, {PARQUET} or {RESULTS} of `cuda-l2 bench`, the CSV of `cuda-l2 library bench`, an archive, the JSON of"
    " `cuda-l2 optimize --json`, comparison.csv of `cuda-l2 compare`, verification.json, tasks.csv, or the .jsonl of"
    " `cuda-l2 train`"
)

Reader = Callable[[Found, Path, str], bool]
"""Adds what a file holds; False where the file is of another kind."""


def read(paths: Iterable[Path]) -> Found:
    """Everything that these files and folders hold. UserError where nothing is found."""
    found, given = Found(), list(paths)
    if not given:
        raise UserError("name the folders, files or archives that the report is of")
    for path in given:
        if path.is_file():
            if not _read_file(found, path, path.name):
                raise UserError(f"{path} holds no results that a report can show; it reads {KNOWN}")
            continue
        for each in sorted(each for each in path.rglob("*") if each.is_file()):
            name = each.relative_to(path.parent if path.name else path).as_posix()
            try:
                _read_file(found, each, name)
            except UserError as error:  # one damaged file does not hide the others
                found.notes.append(str(error))
    if found.empty:
        why = f": {'; '.join(found.notes)}" if found.notes else f"; a report shows {KNOWN}"
        raise UserError(f"{', '.join(map(str, given))}: no results found{why}")
    return found


def _read_file(found: Found, path: Path, name: str) -> bool:
    """Add what one file holds; whether it is one of a known kind."""
    if path.name == RESULTS and any((path.parent / table).exists() for table in (CSV, PARQUET)):
        return True  # the table beside it has the same rows
    if path.name == CSV and (path.parent / PARQUET).exists():
        return True
    readers: dict[str, Reader] = {".csv": _csv, ".parquet": _parquet, ".jsonl": _lines, ".json": _json}
    reader = readers.get(path.suffix)
    if reader:
        try:
            return reader(found, path, name)
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
            raise UserError(f"{path} is damaged, or another version's: {error}") from None
    try:
        with path.open("rb") as file:
            begins = file.read(len(SQLITE))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return begins == SQLITE and _archive(found, path, name)


def _csv(found: Found, path: Path, name: str) -> bool:
    reader = csv.DictReader(io.StringIO(read_text(path)))
    table, columns = list(reader), list(reader.fieldnames or ())
    if set(columns) >= rows.NEEDED:
        _table(found, path, name, table)
        return True
    if path.name == "tasks.csv":
        found.sheets.append(Sheet(name, tuple(columns), tuple(tuple(row[c] or "" for c in columns) for row in table)))
        return True
    for needed, into, command in (
        (models.STEPS, found.models, "cuda-l2 bench --model"),
        (models.PRODUCTS, found.products, "cuda-l2 library bench"),
    ):
        if set(columns) >= needed:
            into.append(models.compared(*_about(path, name, command), table))
            return True
    if set(columns) >= searchers.COLUMNS:
        found.contests.append(searchers.contest(*_about(path, name, "cuda-l2 compare"), table))
        return True
    if set(columns) >= PROVED:
        for number, row in enumerate(table, 1):
            shapes = f"{row['interior']} and {row['edge']}"
            found.proofs[row["kernel"]] = Proof(f"{name}, row {number}", row["verdict"], row["checks"], shapes)
        return True
    if path.name == CSV:
        missing = ", ".join(sorted(rows.NEEDED - set(columns)))
        raise UserError(f"{path} is no table of `cuda-l2 bench`: it has no column {missing}")
    return False


def _parquet(found: Found, path: Path, name: str) -> bool:
    parquet = imported("pyarrow.parquet", f"reading {path} needs", "report")
    table = parquet.read_table(path).to_pylist()
    if table and not set(table[0]) >= rows.NEEDED:
        return False
    _table(found, path, name, table)
    return True


def _table(found: Found, path: Path, name: str, table: list[dict[str, Any]]) -> None:
    first = table[0] if table else {}
    origin, _ = _about(path, name, BENCH)
    environment = origin.environment or {
        column.removeprefix("env_"): value for column, value in first.items() if column.startswith("env_") and value
    }
    machine = origin.machine or str(first.get("machine") or "")
    found.cases += rows.cases(replace(origin, machine=machine, environment=environment), table)


def _about(path: Path, name: str, command: str) -> tuple[Origin, str]:
    """Machine, command and date of a file, as the nearest environment.json says: of its folder, else of one above.

    name: the file's path from what the user gave, above which nothing is read. Settings count in its own folder alone.
    """
    folders = list(path.parents)[: max(1, name.count("/"))]
    beside = next((each for folder in folders if (each := folder / ENVIRONMENT).exists()), None)
    read = json.loads(read_text(beside)) if beside else {}
    shared = read if isinstance(read, dict) else {}
    settings = (shared.get("settings") or {}) if beside and beside.parent == path.parent else {}
    said = str(shared.get("machine", "")), shared.get("environment") or {}, _command(command, settings)
    return Origin(name, *said), str(shared.get("date", "date unknown"))


def _command(command: str, settings: dict[str, Any]) -> str:
    """A command with the settings that its file keeps."""
    said = ", ".join(f"{name} {value}" for name, value in settings.items() if value not in (None, False, ""))
    return f"{command} ({said})" if said else command


def _lines(found: Found, path: Path, name: str) -> bool:
    """A run of bench that was not finished, or one of train."""
    texts = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    try:
        first = json.loads(texts[0])
    except (IndexError, ValueError):
        return False
    if not isinstance(first, dict):
        return False
    if str(first.get("format", "")).startswith(TRAINING):
        _training(found, path, name, first, texts[1:])
        return True
    if first.get("kind") != Header.kind:
        return False
    header, measured, damaged = from_json(Header, texts[0].decode()), {}, 0
    for text in texts[1:]:
        try:
            measurement = from_json(Measurement, text.decode())
        except (ValueError, TypeError, KeyError, AttributeError):
            damaged += 1
            continue
        measured[measurement.key] = measurement
    if damaged:
        found.notes.append(f"{name}: {damaged} damaged lines are left out")
    origin = Origin(name, header.machine, header.environment, _command(BENCH, header.settings))
    found.cases += rows.cases(origin, grid.rows(header, list(measured.values())))
    return True


def _training(found: Found, path: Path, name: str, head: dict[str, Any], texts: list[bytes]) -> None:
    rewards, correct = [], []
    for text in texts:
        try:
            group = json.loads(text)
        except ValueError:
            continue  # the last line of a killed run
        if isinstance(group, dict) and group.get("speedups") and group.get("statuses"):
            rewards.append(statistics.fmean(float(value or 0) for value in group["speedups"]))
            correct.append(statistics.fmean(status == "measured" for status in group["statuses"]))
    if rewards:
        origin, date = _about(path, name, TRAINING)
        about = f"{origin.device}; {head.get('created') or date}"
        found.trainings.append(Training(name, str(head.get("stage", "")), about, tuple(rewards), tuple(correct)))


def _json(found: Found, path: Path, name: str) -> bool:
    value = json.loads(read_text(path))
    if isinstance(value, dict) and isinstance(value.get("figures"), dict) and "environment" in value:
        found.verifications.append(Verification(name, value["environment"], value["figures"]))
        return True
    results = value if isinstance(value, list) else [value]
    results = [result for result in results if isinstance(result, dict) and "gemm" in result and "reports" in result]
    number = 0
    for result in results:
        for protocol, trial in result["reports"].items():
            number += 1
            origin = Origin(name, trial.get("machine", ""), trial.get("environment", {}), "cuda-l2 optimize --json")
            found.cases.append(rows.trial_case(origin, number, result["gemm"], {**trial, "protocol": protocol}))
    return bool(results)


def of_tasks(path: Place, tasks: Sequence[Task]) -> Found:
    """What an archive holds of these tasks."""
    found = Found()
    _archive(found, path, path.name if isinstance(path, Path) else str(path), tasks)
    return found


def _archive(found: Found, path: Place, name: str, tasks: Sequence[Task | None] = (None,)) -> bool:
    """The last report of every task, machine and protocol, and how the searches went. tasks: None for all."""
    with Archive(path, reading=True) as archive:
        trials = [each for task in tasks for each in archive.numbered(task)]
    if not trials:
        found.notes.append(f"{name} holds no trials")
    reports: dict[tuple[str, str, str], tuple[int, Trial]] = {}
    searched: dict[tuple[str, str], list[Trial]] = {}
    for number, trial in trials:
        task = str(trial.task)
        if trial.protocol == "search":
            searched.setdefault((task, trial.machine), []).append(trial)
        elif trial.timing and trial.speedup and trial.protocol != "finalists":
            reports[task, trial.machine, trial.protocol] = number, trial
    for (task, machine, _), (number, trial) in reports.items():
        origin = Origin(name, machine, trial.environment, f"cuda-l2 optimize {task}")
        found.cases.append(rows.of_trial(origin, number, trial))
    for (task, machine), tried in searched.items():
        origin = Origin(name, machine, tried[-1].environment, f"cuda-l2 optimize {task}")
        found.searches.append(_search(origin, task, tried))
    return True


def _search(origin: Origin, task: str, tried: list[Trial]) -> Search:
    rejected: dict[str, int] = {}
    for trial in tried:
        if trial.speedup:
            continue
        check = trial.verdict.check if trial.verdict else ""
        reason = f"{trial.status} in the check '{check}'" if check else trial.status
        rejected[reason] = rejected.get(reason, 0) + 1
    return Search(
        origin,
        task,
        tuple(trial.speedup or None for trial in tried),
        rejected,
        tuple(dict.fromkeys(trial.candidate.proposer for trial in tried)),
        tried[0].created,
        tried[-1].created,
    )
