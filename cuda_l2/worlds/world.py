"""A world: the measurements of one machine with what they mean, as one Parquet file.

The file's metadata holds the machine, the schedule spaces as they were and the settings, the table a row a measurement.
"""

import dataclasses
import functools
import hashlib
import json
import typing
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda_l2 import tasks
from cuda_l2.families._base import Family, Schedule, all_families
from cuda_l2.machine._base import Target
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Task, from_json, to_json
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported, whole
from cuda_l2.system.text import counted
from cuda_l2.worlds.rows import Row

FORMAT = "cuda-l2 world 1"
METADATA = b"cuda-l2"
TARGETS: Mapping[str, type[CpuTarget] | type[CudaTarget]] = {"cpu": CpuTarget, "cuda": CudaTarget}
ARROW = {str: "string", int: "int64", float: "float64", tuple[int, ...]: "list"}

Choices = tuple[tuple[str, tuple[int, ...]], ...]
"""A schedule space: names and values of a family's choices."""


@dataclass(frozen=True)
class Head:
    """What all rows share: the machine that gave them and the schedule spaces that they are of."""

    kind: str  # of target: cpu or cuda
    machine: str
    target: dict[str, Any]  # the fields of the target
    environment: dict[str, Any]
    protocol: str
    spaces: dict[str, Choices]  # by family
    settings: dict[str, Any] = field(default_factory=dict)
    created: str = ""
    version: str = ""  # of the package
    format: str = FORMAT

    def restored(self) -> Target:
        """The machine as a target: schedules can be written for it here."""
        return from_json(TARGETS[self.kind], json.dumps(self.target))


@dataclass(frozen=True)
class World:
    """Measurements of one machine, each task and schedule once."""

    head: Head
    rows: tuple[Row, ...]

    @functools.cached_property
    def target(self) -> Target:
        return self.head.restored()

    @functools.cached_property
    def families(self) -> tuple[Family, ...]:
        """The families with a measurement, in the order of all families."""
        return tuple(family for family in all_families() if family.name in self.head.spaces)

    @functools.cached_property
    def by_task(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows:
            found[row.task].append(row)
        return dict(found)

    @functools.cached_property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of which a schedule was measured, in the order of their texts."""
        texts = sorted({row.task for row in self.rows if row.measured})
        return tuple(tasks.parse(text, self.head.kind) for text in texts)

    def __str__(self) -> str:
        measured = sum(row.measured for row in self.rows)
        return (
            f"{counted(len(self.by_task), 'task')}, {counted(len(self.rows), 'measurement')} ({measured:,} timed) of"
            f" {self.head.machine}"
        )


def space_of(family: Family) -> Choices:
    return tuple((choice.name, choice.values) for choice in family.choices)


def space_version(choices: Choices) -> str:
    """A short name of a schedule space."""
    return hashlib.sha256(json.dumps(choices).encode()).hexdigest()[:8]


def target_fields(target: Target) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(to_json(target))
    return fields


def write(world: World, path: Path) -> None:
    """Write a world whole. UserError where it cannot be; a file that was there before stays then."""
    arrow, parquet = _arrow()
    kinds = {"string": arrow.string(), "int64": arrow.int64(), "float64": arrow.float64()}
    kinds["list"] = arrow.list_(arrow.int32())
    hints = typing.get_type_hints(Row)
    columns = [arrow.field(each.name, kinds[ARROW[hints[each.name]]]) for each in dataclasses.fields(Row)]
    schema = arrow.schema(columns, metadata={METADATA: to_json(world.head).encode()})
    values = {name: [getattr(row, name) for row in world.rows] for name in schema.names}
    table = arrow.table(values, schema=schema)
    with whole(path) as partial:
        parquet.write_table(table, partial, compression="zstd")


def read(path: Path, warn: Callable[[str], None] = lambda text: None) -> World:
    """Read a world, its schedules as this version has them.

    UserError where the file is none or is damaged, or where its schedule spaces cannot be mapped onto those of this
    version. warn: called where they were mapped, with what was left out.
    """
    arrow, parquet = _arrow()
    try:
        with parquet.ParquetFile(path) as file:
            table = file.read()
        if METADATA not in (table.schema.metadata or ()):
            raise ValueError("a Parquet file of something else")
        head = _head(table.schema.metadata[METADATA].decode())
        rows = [Row(**{**fields, "schedule": tuple(fields["schedule"])}) for fields in table.to_pylist()]
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; make a world with `cuda-l2 record`") from None
    except (OSError, arrow.ArrowException, ValueError, KeyError, TypeError, AttributeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is no world, or is damaged ({said}); make one with `cuda-l2 record`") from None
    if head.format != FORMAT or head.kind not in TARGETS:
        raise UserError(f"{path} is of format {head.format!r}, this version reads {FORMAT!r}; record it again")
    if any(row.measured and not (row.latency_us > 0 and row.speedup > 0) for row in rows):
        raise UserError(f"{path} is damaged: a schedule that was timed has no time; record it again")
    world = _mapped(World(head, tuple(rows)), path, warn)
    if not world.tasks:
        raise UserError(f"{path} holds no schedule with a time; record more of it")
    return world


def join(worlds: Sequence[tuple[Path, World]]) -> World:
    """One world of several of the same machine, spaces and protocol; of the same measurement the last counts."""
    (first, base), *_ = worlds
    rows: dict[Any, Row] = {}
    for path, world in worlds:
        for name in ("machine", "protocol", "spaces"):
            ours, theirs = getattr(base.head, name), getattr(world.head, name)
            shared = ours.keys() & theirs.keys() if isinstance(ours, dict) else ()
            if any(ours[key] != theirs[key] for key in shared) or (not isinstance(ours, dict) and ours != theirs):
                raise UserError(f"{path} and {first} are not of one {name}: they cannot be one world")
        rows.update({row.key: row for row in world.rows})
    spaces = {name: space for _, world in worlds for name, space in world.head.spaces.items()}
    return World(dataclasses.replace(base.head, spaces=spaces), tuple(rows[key] for key in sorted(rows)))


def _head(text: str) -> Head:
    head = from_json(Head, text)
    spaces = {
        name: tuple((choice, tuple(values)) for choice, values in choices) for name, choices in head.spaces.items()
    }
    return dataclasses.replace(head, spaces=spaces)


def _mapped(world: World, path: Path, warn: Callable[[str], None]) -> World:
    """The world in this version's schedule spaces: what is no schedule of them any more is left out."""
    known = {family.name: family for family in all_families()}
    changed = set()
    for name, before in world.head.spaces.items():
        if name not in known:
            raise UserError(f"{path} has schedules of the family {name}, which this version does not have")
        now = space_of(known[name])
        if [choice for choice, _ in before] != [choice for choice, _ in now]:
            old, new = space_version(before), space_version(now)
            raise UserError(
                f"{path} was recorded with other choices of {name} (space {old}, now {new}): record it again"
            )
        if before != now:
            changed.add(name)
    if not changed:
        return world
    kept = tuple(
        row for row in world.rows if row.family not in changed or _still_valid(row, known[row.family], world.target)
    )
    left_out = counted(len(world.rows) - len(kept), "measurement")
    warn(f"{path} was recorded with an older schedule space of {', '.join(sorted(changed))}: {left_out} left out")
    spaces = {name: space_of(known[name]) for name in world.head.spaces}
    return World(dataclasses.replace(world.head, spaces=spaces), kept)


def _still_valid(row: Row, family: Family, target: Target) -> bool:
    try:
        Schedule(family, tasks.parse(row.task, target.name), target, row.schedule)
    except ValueError:
        return False
    return True


def _arrow() -> tuple[Any, Any]:
    return imported("pyarrow", "worlds need", "worlds"), imported("pyarrow.parquet", "worlds need", "worlds")
