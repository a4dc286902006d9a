"""Recording of a world: a pool of schedules that all tasks share, and more like each task's fastest, task by task.

Measurements go to a file of lines beside the world; the world is written whole from them when the run ends, also when
it is interrupted, and a killed run goes on from both.
"""

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import Family, Schedule, all_families, families_for
from cuda_l2.machine._base import Target
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.propose._base import FamilySpace, Values, draw, mutated
from cuda_l2.records import Candidate, Task, TimingStatus
from cuda_l2.reward import count_tokens
from cuda_l2.rigs import Rig
from cuda_l2.runs.grid import drawn_shapes, read_grid
from cuda_l2.runs.results import Header, RunFile
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import counted
from cuda_l2.system.values import now
from cuda_l2.version import __version__
from cuda_l2.worlds.rows import Row, row_of
from cuda_l2.worlds.world import Head, World, read, space_of, target_fields, write

OFF_GRID = "off-grid"
OFF_GRID_SHAPES = 400
"""Shapes drawn at random that a recording adds to the paper's."""
OWN = 4
"""Schedules by each family's own ranking that count as what it tries first, beside its defaults."""
WAIT_S = 60.0
"""Time for one schedule, waiting for a quiet machine included; the next run measures what has none then."""
MOST_MISSES = 100
"""Draws in turn that give no new schedule, after which a small space is taken to have no more."""

PARENTS = 6
"""The fastest of a task, of which more are drawn."""
NEAR_GROUP = 16
"""The most of these that are drawn at once: each group knows what came of the one before the last."""

Entry = tuple[Family, Values]
"""A schedule of the pool."""
Known = dict[tuple[str, str, Values], Row]
"""Measurements of one task by key; they grow meanwhile."""


class Journal(RunFile[Row]):
    """The measurements of a run that has not ended."""

    record = Row
    advice = "choose another --out, or remove the file"


def grid_tasks(text: str) -> list[Task]:
    """The shapes of a grid: `paper`, `off-grid` (400, M N and K from 1, ragged, fp16 and bf16), a file or a list."""
    return list(drawn_shapes(OFF_GRID_SHAPES, 0)) if text == OFF_GRID else list(read_grid(text))


def pool(tasks: Sequence[Task], target: Target, count: int, seed: int) -> list[Entry]:
    """Up to `count` schedules that all tasks share: half what families try first on most tasks, the rest random.

    Random ones are drawn in the space of one task after another, so that every size has some that suit it. UserError
    where no family serves a task.
    """
    rng = np.random.default_rng(seed)
    spaces = [FamilySpace(family, task, target) for task in tasks for family in _serving(task, target)]
    tried = Counter((space.family, values) for space in spaces for values in own_schedules(space))
    found = dict.fromkeys(entry for entry, _ in tried.most_common((count + 1) // 2))
    misses = 0
    while len(found) < count and misses < MOST_MISSES:
        space = spaces[int(rng.integers(len(spaces)))]
        before = len(found)
        found[space.family, draw(space, rng)] = None
        misses = misses + 1 if len(found) == before else 0
    return list(found)


def own_schedules(space: FamilySpace) -> list[Values]:
    """What a family would try first for one task."""
    return list(dict.fromkeys([*space.defaults(), *space.ranked(OWN)]))


def schedules_for(task: Task, target: Target, entries: Sequence[Entry]) -> list[Schedule]:
    """The schedules of the pool that are valid for a task, and what its families try first, each once."""
    serving = _serving(task, target)
    own = [(family, values) for family in serving for values in own_schedules(FamilySpace(family, task, target))]
    found = []
    for family, values in dict.fromkeys([*own, *entries]):
        if family in serving:
            with contextlib.suppress(ValueError):
                found.append(Schedule(family, task, target, values))
    return found


def part_of(tasks: Sequence[Task], number: int, parts: int) -> list[Task]:
    """The tasks of one part of `parts`; every part has small and large ones."""
    return list(tasks[number - 1 :: parts])


class Recorder(Closing):
    """Measures schedules on one machine into one world. A context manager, which writes the world at its end."""

    def __init__(self, out: Path, rig: Rig, settings: dict[str, Any], say: Callable[[str], None]) -> None:
        """settings: of the pool, which the world keeps. UserError where the file is another machine's or no world."""
        self._out, self._rig, self._say, self._settings = out, rig, say, settings
        earlier = read(out, say) if out.exists() else None
        if earlier and earlier.head.machine != rig.target.machine:
            raise UserError(
                f"{out} was recorded on {earlier.head.machine}, not on {rig.target.machine}: choose another --out"
            )
        self._earlier = earlier.rows if earlier else ()
        header = Header(rig.target.machine, rig.environment(), {}, now(), "cuda-l2 recording")
        self._journal = Journal(out.with_name(f"{out.name}.lines"), header, say)
        self.complete = False

    @property
    def rows(self) -> list[Row]:
        """All measurements so far."""
        found = {row.key: row for row in (*self._earlier, *self._journal.records)}
        return [found[key] for key in sorted(found)]

    def record(self, tasks: Sequence[Task], entries: Sequence[Entry], near: int = 0, seed: int = 0) -> None:
        """Measure what is not yet known of these tasks: the pool, then `near` schedules of each like its fastest."""
        found: dict[str, Known] = defaultdict(dict)
        for row in self.rows:
            found[row.task][row.key] = row
        places = {task: number for number, task in enumerate(tasks, 1)}
        work, untimed = self._work(tasks, entries, found, near, np.random.default_rng([seed, 1])), 0
        for task, groups in itertools.groupby(self._prefetched(work), lambda each: each[0]):
            try:
                self._rig.require_feasible(task)  # not before: the task ahead has given its memory back now
            except UserError as error:
                self._say(f"left out: {error}")
                continue
            wanted = measured = 0
            with Evaluator(task, self._rig) as evaluator:
                for _, group in groups:
                    wanted += len(group)
                    for row in self._measured(evaluator, group):
                        found[row.task][row.key] = row
                        measured += 1
            untimed += wanted - measured
            self._say(f"{task}, {places[task]} of {len(tasks)}: {counted(measured, 'schedule')} measured")
        if untimed:
            self._say(f"{counted(untimed, 'schedule')} not timed, as the machine was busy: the same command goes on")
        self.complete = not untimed

    def close(self) -> None:
        """Write the world; what has no measurement at all leaves none."""
        rows = self.rows
        try:
            if any(row.measured for row in rows):
                write(World(self._head(rows), tuple(rows)), self._out)
                if self.complete:
                    self._journal.path.unlink()
        finally:
            self._journal.close()

    def _work(
        self,
        tasks: Sequence[Task],
        entries: Sequence[Entry],
        found: dict[str, Known],
        near: int,
        rng: np.random.Generator,
    ) -> Iterator[tuple[Task, list[Candidate]]]:
        """What is to be measured, group by group. found: measurements by task."""
        for task in tasks:
            schedules, known = schedules_for(task, self._rig.target, entries), found[str(task)]
            new = [each for each in schedules if (str(task), each.family.name, each.values) not in known]
            for start in range(0, len(new), self._rig.group):
                yield task, [each.family.render(each, "record") for each in new[start : start + self._rig.group]]
            for group in self._near(task, schedules, known, near, rng):
                yield task, group

    def _near(
        self, task: Task, schedules: Sequence[Schedule], known: Known, count: int, rng: np.random.Generator
    ) -> Iterator[list[Candidate]]:
        """Groups of schedules, `count` in all with those known, that differ from the fastest in one to three choices.

        A group is drawn before the one ahead of it is judged; an empty one stands where nothing is known yet.
        """
        met = {(str(task), each.family.name, each.values) for each in schedules}
        waited, left = False, count - len(known.keys() - met)
        spaces = {
            family.name: FamilySpace(family, task, self._rig.target) for family in _serving(task, self._rig.target)
        }
        while left > 0:
            best = sorted((row for row in known.values() if row.measured), key=lambda row: row.latency_us)[:PARENTS]
            if not best and waited:
                return
            group, misses = list[Candidate](), 0
            while best and len(group) < min(left, self._rig.group, NEAR_GROUP) and misses < MOST_MISSES:
                row = best[int(rng.integers(len(best)))]
                values = mutated(spaces[row.family], row.schedule, rng)
                key = row.task, row.family, values
                if key in met or key in known:
                    misses += 1
                    continue
                met.add(key)
                group.append(spaces[row.family].render(values, "record"))
            if best and not group:
                return
            left, waited = left - len(group), not group
            yield group

    def _prefetched(self, work: Iterator[tuple[Task, list[Candidate]]]) -> Iterator[tuple[Task, list[Candidate]]]:
        """The same; the builds of the next group have begun when one is given out."""
        following = next(work, None)
        while following:
            this, following = following, next(work, None)
            if following:
                self._rig.prefetch(following[1])
            yield this

    def _measured(self, evaluator: Evaluator, candidates: Sequence[Candidate]) -> Iterator[Row]:
        """Rows of new candidates; what other work left untimed is measured by the next run."""
        trials = evaluator.evaluate(candidates, self._rig.protocols[SEARCH.name])
        for _ in candidates:
            evaluator.ends = evaluator.clock.now() + WAIT_S
            trial = next(trials)
            if trial.status != TimingStatus.BUSY:
                row = row_of(trial, count_tokens(trial.candidate.source))
                self._journal.append(row)
                yield row

    def _head(self, rows: Sequence[Row]) -> Head:
        target = self._rig.target
        names = {row.family for row in rows}
        return Head(
            kind=target.name,
            machine=target.machine,
            target=target_fields(target),
            environment=self._rig.environment(),
            protocol=SEARCH.name,
            spaces={family.name: space_of(family) for family in all_families() if family.name in names},
            settings=self._settings,
            created=now(),
            version=__version__,
        )


def _serving(task: Task, target: Target) -> tuple[Family, ...]:
    found = families_for(task, target)
    if not found:
        raise UserError(f"no kernel family serves {task} on {target.machine}: there are no schedules to record")
    return found
