"""Recorded worlds: recording, going on after a kill, parts, replay of the loop without a machine, files that are none."""

import math
import shutil
from dataclasses import replace
from operator import ne
from pathlib import Path
from typing import Any

import made_world
import numpy as np
import pytest
from made_world import TARGET
from pyarrow import parquet

from cuda_l2.commands import record as record_command
from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import Choice
from cuda_l2.propose._base import FamilySpace, proposer_maker
from cuda_l2.propose._policy import default_candidates
from cuda_l2.propose._recorded import recorded_space
from cuda_l2.records import Candidate, Gemm, Timing, TimingStatus
from cuda_l2.rigs.recorded import UNKNOWN, RecordedRig
from cuda_l2.runs import recording, workers
from cuda_l2.runs.recording import Recorder, grid_tasks, own_schedules, part_of, pool, schedules_for
from cuda_l2.search import Scope, search
from cuda_l2.system.errors import UserError
from cuda_l2.worlds.rows import row_of
from cuda_l2.worlds.split import split
from cuda_l2.worlds.world import World, join, read, space_of, write

SHAPES = ("128x128x256", "256x64x128:tn", "64x64x64")  # in the order of the world's tasks


@pytest.fixture(scope="module")
def world() -> World:
    return made_world.made_world(SHAPES, 40)


@pytest.fixture
def path(world: World, tmp_path: Path) -> Path:
    write(world, tmp_path / "world.parquet")
    return tmp_path / "world.parquet"


class Killed(BaseException):
    """Nothing in the package catches it."""


class Counting(RecordedRig):
    """Counts the builds; after `most` of them the run is killed."""

    def __init__(self, world: World, most: float = math.inf) -> None:
        super().__init__(world)
        self.most, self.built = most, 0

    def open(self, task: Any, seed: int, *, both_layouts: bool = False) -> Any:
        bench, rig = super().open(task, seed), self
        build = bench.build

        def counted(candidates: Any) -> Any:
            for built in build(candidates):
                if rig.built >= rig.most:
                    raise Killed
                rig.built += 1
                yield built

        bench.build = counted  # type: ignore[method-assign]
        return bench


def record(rig: RecordedRig, out: Path, tasks: Any = None) -> None:
    wanted = list(tasks or rig.world.tasks)
    with Recorder(out, rig, {}, lambda text: None) as recorder:
        recorder.record(wanted, pool(list(rig.world.tasks), rig.target, 40, 0))


def record_near(rig: RecordedRig, out: Path, near: int) -> World:
    tasks = list(rig.world.tasks)
    with Recorder(out, rig, {}, lambda text: None) as recorder:
        recorder.record(tasks, pool(tasks, rig.target, 40, 0), near)
    return read(out)


def facts(world: World) -> dict[Any, tuple[Any, ...]]:
    """What was found of each schedule; NaN is no figure."""
    return {row.key: (row.status, *((row.latency_us, row.speedup) if row.measured else ())) for row in world.rows}


def test_a_world_is_read_as_it_was_written(world, path) -> None:
    found = read(path, pytest.fail)
    assert found.head == world.head and found.target == TARGET
    assert list(map(repr, found.rows)) == list(map(repr, world.rows))
    assert [str(task) for task in found.tasks] == sorted(SHAPES)


def test_a_row_gives_back_the_records_of_its_stages(world) -> None:
    with RecordedRig(world) as rig, Evaluator(world.tasks[0], rig) as evaluator:
        space = recorded_space(world, world.tasks[0])
        for values, row in space.by_values.items():
            (trial,) = evaluator.evaluate([space.render(values, "test")])
            again = row_of(trial, row.tokens)
            assert repr(replace(again, candidate=row.candidate, tokens=row.tokens, created="")) == repr(row)
            assert (trial.build.candidate_id, trial.machine) == (trial.candidate.id, TARGET.machine)


def test_the_loop_runs_on_a_world_as_on_a_machine(world, archive) -> None:
    task = world.tasks[0]
    space = recorded_space(world, task)
    with RecordedRig(world) as rig, Evaluator(task, rig) as evaluator:
        proposer = proposer_maker("random")(space, lambda: archive.trials(task), np.random.default_rng(0))
        progress = search(
            evaluator, proposer, archive, Scope(budget_s=1e9, max_trials=40, first=default_candidates(task, rig.target))
        )
    assert progress.proposed == 40 and progress.best is not None and not progress.interrupted
    kept = archive.trials(task, world.head.machine, "search")
    assert kept and {trial.environment["cpu"] for trial in kept} == {"Made"}
    best = min(row.latency_us for row in space.rows if row.measured)
    assert progress.best.timing.candidate.latency_us.estimate < 1.5 * best
    assert {trial.status for trial in kept} <= {TimingStatus.MEASURED, "incorrect"}


def test_what_was_not_recorded_is_refused_and_says_so(world) -> None:
    with RecordedRig(world) as rig, Evaluator(world.tasks[0], rig) as evaluator:
        (trial,) = evaluator.evaluate([Candidate("int main;", family="cpu_gemm")])
    assert trial.status == "refused" and trial.reason == UNKNOWN
    with pytest.raises(UserError, match="was not recorded"), RecordedRig(world) as rig:
        Evaluator(Gemm.parse("8x8x8"), rig)


def test_a_recording_measures_the_pool_on_every_task(world, tmp_path) -> None:
    record(RecordedRig(world), tmp_path / "again.parquet")
    assert facts(read(tmp_path / "again.parquet")) == facts(world)
    assert not list(tmp_path.glob("*.lines"))


def test_a_killed_recording_goes_on_and_measures_nothing_twice(world, tmp_path) -> None:
    out, other = tmp_path / "world.parquet", tmp_path / "other.parquet"
    first = Counting(world, most=30)
    recorder = Recorder(out, first, {}, lambda text: None)
    with pytest.raises(Killed):
        recorder.record(list(world.tasks), pool(list(world.tasks), first.target, 40, 0))
    shutil.copy(f"{out}.lines", f"{other}.lines")  # the process is gone: no world was written
    second = Counting(world)
    record(second, other)
    assert second.built == len(world.rows) - 30
    assert facts(read(other)) == facts(world)


def test_a_complete_recording_takes_more_tasks(world, tmp_path) -> None:
    out = tmp_path / "world.parquet"
    record(RecordedRig(world), out, world.tasks[:1])
    rig = Counting(world)
    record(rig, out)
    assert rig.built == sum(row.task != str(world.tasks[0]) for row in world.rows)
    assert facts(read(out)) == facts(world)


def test_more_schedules_of_a_task_are_like_its_fastest(world, tmp_path) -> None:
    """What a made world does not hold is refused, and a row all the same."""
    found = record_near(RecordedRig(world), tmp_path / "near.parquet", 20)
    pooled = {row.key for row in world.rows}
    for task, rows in found.by_task.items():
        best = sorted((row for row in rows if row.measured), key=lambda row: row.latency_us)[: recording.PARENTS]
        new = [row for row in rows if row.key not in pooled]
        assert len(new) == 20 and len(rows) == 20 + sum(row.task == task for row in world.rows)
        apart = [
            min(sum(map(ne, row.schedule, each.schedule)) for each in best if each.family == row.family) for row in new
        ]
        # a change may make later choices invalid
        assert min(apart) >= 1 and sorted(apart)[len(apart) // 2] <= 3


def test_a_killed_recording_of_more_schedules_goes_on_to_as_many(world, tmp_path) -> None:
    out, other = tmp_path / "world.parquet", tmp_path / "other.parquet"
    tasks, whole = list(world.tasks), len(world.rows) + 20 * len(world.tasks)
    first = Counting(world, most=len(world.rows) // 3 + 25)
    with pytest.raises(Killed):
        Recorder(out, first, {}, lambda text: None).record(tasks, pool(tasks, first.target, 40, 0), 20)
    shutil.copy(f"{out}.lines", f"{other}.lines")
    second = Counting(world)
    found = record_near(second, other, 20)
    assert len(found.rows) == whole and second.built == whole - first.built
    again = Counting(world)
    assert len(record_near(again, other, 20).rows) == whole and not again.built


def test_builds_of_the_next_group_begin_before_a_group_is_judged(world, tmp_path) -> None:
    rig, begun = Counting(world), set[str]()
    build_of = rig.open

    def opened(task: Any, seed: int, **terms: Any) -> Any:
        bench = build_of(task, seed, **terms)
        build = bench.build

        def required(candidates: Any) -> Any:
            assert rig.built < rig.group or {each.id for each in candidates} <= begun
            return build(candidates)

        bench.build = required
        return bench

    rig.open = opened  # type: ignore[method-assign]
    rig.prefetch = lambda candidates: begun.update(each.id for each in candidates) or []  # type: ignore[method-assign]
    record_near(rig, tmp_path / "near.parquet", 20)
    assert len(begun) > rig.group


def test_whether_a_task_fits_is_asked_when_the_one_before_has_given_its_memory_back(world, tmp_path) -> None:
    class Full(RecordedRig):
        """Has room for one task, and none for the second ever."""

        held = 0

        def open(self, task: Any, seed: int, *, both_layouts: bool = False) -> Any:
            bench = super().open(task, seed)
            self.held += 1
            bench.close = lambda: setattr(self, "held", self.held - 1)  # type: ignore[method-assign]
            return bench

        def require_feasible(self, task: Any) -> None:
            if self.held or task == world.tasks[1]:
                raise UserError(f"{task} does not fit")

    said, out = list[str](), tmp_path / "world.parquet"
    with Recorder(out, Full(world), {}, said.append) as recorder:
        recorder.record(list(world.tasks), pool(list(world.tasks), TARGET, 40, 0), 20)
    assert [line for line in said if "left out" in line] == [f"left out: {world.tasks[1]} does not fit"]
    assert set(read(out).by_task) == {str(task) for task in world.tasks} - {str(world.tasks[1])}


def test_an_interrupted_recording_leaves_a_world_of_what_it_has(world, tmp_path) -> None:
    with pytest.raises(Killed):
        record(Counting(world, most=20), tmp_path / "world.parquet")
    assert len(read(tmp_path / "world.parquet").rows) == 20
    assert (tmp_path / "world.parquet.lines").exists()


def test_what_a_busy_machine_left_untimed_is_measured_by_the_next_run(world, tmp_path, monkeypatch) -> None:
    out, said = tmp_path / "world.parquet", list[str]()
    busy = next(row for row in world.rows if row.measured)
    timing = type(busy).timing

    def timed(self: Any, protocol: str) -> Any:
        return Timing(TimingStatus.BUSY, protocol, "busy") if self == busy else timing(self, protocol)

    with monkeypatch.context() as patch, Recorder(out, RecordedRig(world), {}, said.append) as recorder:
        patch.setattr(type(busy), "timing", timed)
        recorder.record(list(world.tasks), pool(list(world.tasks), TARGET, 40, 0))
    assert "1 schedule not timed" in said[-1] and len(read(out).rows) == len(world.rows) - 1
    rig = Counting(world)
    record(rig, out)
    assert rig.built == 1 and facts(read(out)) == facts(world)


def test_parts_join_to_the_whole(world, tmp_path) -> None:
    paths = [tmp_path / f"{number}.parquet" for number in (1, 2)]
    for number, out in enumerate(paths, 1):
        record(RecordedRig(world), out, part_of(world.tasks, number, 2))
    assert facts(join([(each, read(each)) for each in paths])) == facts(world)


def test_workers_record_a_part_each_and_go_on_from_what_is_there(world, path, monkeypatch) -> None:
    out = path.with_name("out.parquet")
    write(World(world.head, world.rows[:1]), out)

    def recorded(commands: Any, say: Any, **_: Any) -> None:
        for number, arguments in enumerate(commands.values()):
            place = Path(arguments[arguments.index("--out") + 1])
            assert len(read(place).rows) == 1  # nothing is measured twice
            write(World(world.head, world.rows[number::2]), place)

    monkeypatch.setattr(workers, "gpus", lambda asked: ["0", "1"])
    monkeypatch.setattr(workers, "share", recorded)
    apart = record_command._by_workers(record_command.RecordSettings(out=out, workers="auto"))
    assert [each.name for each in apart] == ["out.gpu-0.parquet", "out.gpu-1.parquet"]
    assert facts(read(out)) == facts(world)


def test_worlds_of_two_machines_are_not_joined_nor_gone_on_with(world, path) -> None:
    there = made_world.made_world(SHAPES[:1], 40, replace(TARGET, model="Other"))
    with pytest.raises(UserError, match="not of one machine"):
        join([(path, world), (Path("there"), there)])
    with pytest.raises(UserError, match=r"recorded on cpu:Made.*not on cpu:Other"):
        record(RecordedRig(there), path)


def test_the_pool_is_shared_and_every_task_has_what_an_engineer_would_try(world) -> None:
    entries = pool(list(world.tasks), TARGET, 40, 0)
    assert len(entries) == len(set(entries)) == 40
    assert entries == pool(list(world.tasks), TARGET, 40, 0) != pool(list(world.tasks), TARGET, 40, 1)
    for task in world.tasks:
        valid = {each.values for each in schedules_for(task, TARGET, entries)}
        assert valid >= set(own_schedules(FamilySpace(world.families[0], task, TARGET)))
    shared = [{each.schedule for each in world.by_task[str(task)]} for task in world.tasks]
    assert len(shared[0] & shared[1]) > 5


def test_the_grids_are_the_papers_and_ragged_shapes() -> None:
    assert len(grid_tasks("paper")) == 1000
    ragged = grid_tasks("off-grid")
    assert len(ragged) == 400 and {task.dtype for task in ragged} == {"float16", "bfloat16"}
    assert any(task.m == 1 for task in ragged) and sum(task.n % 8 > 0 for task in ragged) > 200


def test_an_older_space_is_mapped_with_a_warning(world, path, monkeypatch) -> None:
    family = world.families[0]
    fewer = tuple(
        Choice(choice.name, choice.values[:1] if choice.name == "PREFETCH" else choice.values, choice.help)
        for choice in family.choices
    )
    monkeypatch.setattr(type(family), "choices", fewer)
    warned: list[str] = []
    found = read(path, warned.append)
    assert 0 < len(found.rows) < len(world.rows) and found.head.spaces["cpu_gemm"] == space_of(family)
    assert len(warned) == 1 and "older schedule space of cpu_gemm" in warned[0]


def test_a_space_with_other_choices_is_refused(path, world, monkeypatch) -> None:
    family = world.families[0]
    monkeypatch.setattr(type(family), "choices", family.choices[:-1])
    with pytest.raises(UserError, match="other choices of cpu_gemm"):
        read(path)


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def no_metadata(path: Path) -> None:
    parquet.write_table(parquet.read_table(path).replace_schema_metadata({}), path)


def no_times(path: Path) -> None:
    world = made_world.made_world(SHAPES[:1], 20)
    write(World(world.head, tuple(replace(row, latency_us=math.nan) for row in world.rows)), path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (damaged, "is damaged"),
        (lambda path: path.write_text("no world"), "is damaged"),
        (no_metadata, "no world"),
        (no_times, "has no time"),
        (Path.unlink, "there is no file"),
    ],
)
def test_a_file_that_is_no_world_is_one_clear_error(path, spoil, says) -> None:
    spoil(path)
    with pytest.raises(UserError, match=says) as raised:
        read(path)
    assert "\n" not in str(raised.value)


def test_a_full_disk_leaves_the_world_that_was_there(path, world, monkeypatch) -> None:
    before = path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.raises(UserError, match="No space left"):
        write(world, path)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_held_out_tasks_are_always_the_same_and_never_learnt_from(world, tmp_path) -> None:
    learnt, held_out = split(world.tasks, "1")
    assert (learnt, held_out) == split(tuple(reversed(world.tasks)), "1")
    assert len(held_out) == 1 and not set(learnt) & set(held_out) and len(learnt) == 2
    (tmp_path / "held.txt").write_text("64x64x64  # small\n\n128x128x256\n")
    assert [str(task) for task in split(world.tasks, str(tmp_path / "held.txt"))[1]] == ["128x128x256", "64x64x64"]
    assert split(world.tasks, "")[1] == []
    with pytest.raises(UserError, match="does not have"):
        split(world.tasks, ",".join(f"{n}x{n}x{n}" for n in range(1, 99)))  # longer than a path may be
    for text, says in (("3", "at least one"), ("9x9x9", "does not have"), (",".join(SHAPES), "at least one")):
        with pytest.raises(UserError, match=says):
            split(world.tasks, text)


def test_record_on_this_machine_through_the_command(typed, tmp_path) -> None:
    arguments = ("record", "64x48x80", "--out", "world.parquet", "--schedules", "3", "--target", "cpu")
    status, out, _ = typed(*arguments)
    assert status == 0 and "world.parquet: 1 task" in out
    found = read(tmp_path / "world.parquet")
    assert found.by_task.keys() == {"64x48x80"} and all(row.tokens > 100 and row.candidate for row in found.rows)
    assert any(row.measured and row.latency_us > 0 and row.reference for row in found.rows)
    status, out, _ = typed("record", "--out", "joined.parquet", "--join", "world.parquet", "world.parquet")
    assert status == 0 and facts(read(tmp_path / "joined.parquet")) == facts(found)
