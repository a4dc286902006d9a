"""cuda-l2 record: measure many schedules of many tasks into one file, on which searches replay without the machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2.commands._options import end_interrupted, part, require_target, require_writable, tell
from cuda_l2.records import Task
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import counted


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """What to record."""

    out: Path
    """File of the world, in Parquet; an interrupted recording goes on, and a complete one takes more tasks."""
    grid: str = ""
    """More shapes: paper (1,000), off-grid (400 drawn at random), a file with one a line, or a list with commas."""
    schedules: int = 300
    """Size of the pool of schedules that all tasks share; of a task those that are valid for it are measured."""
    near: int = 0
    """More schedules of each task: those that differ from its fastest so far in one to three choices."""
    part: str = "1/1"
    """Measure only this part of the tasks, as in 1/2: for several GPUs, each with a file and CUDA_VISIBLE_DEVICES."""
    workers: str = ""
    """Several GPUs, a process each: auto for all of this machine, or how many; ray://HOST:PORT for those of a Ray
    cluster, ray for one that is started here (docs/scale.md)."""
    join: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative=())] = ()
    """Worlds of one machine, as of its parts, to write as one; nothing is measured."""
    target: str = "auto"
    """Machine to measure on: cpu, cuda, or auto for the GPU where there is one."""
    seed: int = 0
    """Seed of the schedules that are drawn; inputs are always fresh."""


def command(tasks: list[str] | None = None, /, *, settings: RecordSettings) -> None:
    """Measure schedules of tasks, verified and timed, for `cuda-l2 train --stage schedule` and `cuda-l2 compare`.

    Args:
        tasks: Shapes, as in 512x512x512 or 64x4096x4096:tn, or other tasks, as in softmax:rows=64,columns=1000.
    """
    require_target(settings.target)
    number, parts = part(settings.part)
    if settings.schedules < 1:
        raise UserError(f"--schedules must be at least 1, not {settings.schedules}")
    if settings.near < 0:
        raise UserError(f"--near must not be negative, as {settings.near} is")
    if settings.seed < 0:
        raise UserError(f"the seed must not be negative, as {settings.seed} is")
    require_writable(settings.out)
    if settings.join:
        if tasks or settings.grid:
            raise UserError("--join measures nothing and takes no tasks: give one or the other")
        _join(settings.join, settings.out)
        _print(settings.out)
        return
    wanted = _wanted(tasks or [], settings)
    apart = _by_workers(settings) if settings.workers else []

    from cuda_l2.rigs import open_rig
    from cuda_l2.runs.recording import Recorder, part_of, pool

    drawn = {"schedules": settings.schedules, "near": settings.near, "seed": settings.seed}
    with open_rig(settings.target) as rig:
        entries = pool(wanted, rig.target, settings.schedules, settings.seed)
        own = part_of(wanted, number, parts)
        tell(f"a pool of {counted(len(entries), 'schedule')}, {counted(len(own), 'task')}; goes to {settings.out}")
        try:
            with Recorder(settings.out, rig, drawn, tell) as recorder:
                recorder.record(own, entries, settings.near, settings.seed)
        except KeyboardInterrupt:
            end_interrupted()
    for path in apart:
        path.unlink()
        path.with_name(f"{path.name}.lines").unlink(missing_ok=True)  # a part's journal, sent from another machine
    _print(settings.out)


def _wanted(texts: list[str], settings: RecordSettings) -> list[Task]:
    from cuda_l2 import tasks
    from cuda_l2.machine import chosen
    from cuda_l2.runs.recording import grid_tasks

    named = [tasks.parse(text, chosen(settings.target)) for text in texts]
    found = list(dict.fromkeys([*named, *(grid_tasks(settings.grid) if settings.grid else [])]))
    if not found:
        raise UserError("tasks are missing, as in 512x512x512, or --grid: what should be recorded?")
    return found


def _by_workers(settings: RecordSettings) -> list[Path]:
    """Have every GPU record its part, and join the parts; their files, which the world makes superfluous."""
    from cuda_l2.runs import parts

    if settings.part != RecordSettings.part:
        raise UserError("--workers gives each GPU its part: leave --part out")
    out = settings.out
    parts.share(settings.workers, out, "", tell)
    there = parts.files(out, "")
    if there:
        _join([*there, *([out] if out.exists() else [])], out)
    return there


def _join(paths: Sequence[Path], out: Path) -> None:
    from cuda_l2.worlds.world import join, read, write

    write(join([(path, read(path, tell)) for path in paths]), out)


def _print(path: Path) -> None:
    from cuda_l2.worlds.world import read

    print(f"{path}: {read(path, tell)}")
