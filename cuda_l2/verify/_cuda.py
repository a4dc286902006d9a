"""CUDA candidates: launches in a worker process on shared device memory."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cuda_l2 import contract
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cuda import sanitizer
from cuda_l2.machine.cuda.alone import Job, given_file
from cuda_l2.machine.cuda.arena import MESSAGE_TENSORS, NOT_RESTORED, OUTSIDE, CudaArena
from cuda_l2.machine.cuda.buffers import Place
from cuda_l2.machine.cuda.sanitizer import Tool
from cuda_l2.machine.cuda.segments import NOTHING, Copied, Segment, Segments
from cuda_l2.machine.cuda.windows import TENSOR_ALIGN, side_by_side
from cuda_l2.machine.cuda.worker import CudaWorkers, slowest_s
from cuda_l2.machine.fills import POISON_WORDS
from cuda_l2.machine.tensors import poisoned, rounded_up
from cuda_l2.records import Build, BuildStatus, Candidate, Task, Tensor, VerdictStatus
from cuda_l2.system.turns import ALONE, Turns
from cuda_l2.tasks.cases import Case, Cases
from cuda_l2.verify._base import LEAST_OFTEN, C, CheckFailed, GpuSession, Outputs, Turn, require_written

LAUNCH_TIMEOUT_S = 2.0
OFTEN_S = 0.02
"""About how long light launches in a row may take together."""
LOOKS = 3
"""Number of times that light launches are made in a row: what a candidate keeps may be lost on the way."""
REPLAYS = 4
"""Replays of one graph that are launches in a row: to capture a launch takes longer than to replay it."""
PRODUCER_NS = 40_000
BESIDE_NS = 300_000
BACK_TO_BACK = 8
STRESS_S = 0.02
"""What delays may add to a launch."""
SANITIZER_TIMEOUT_S = 120.0
USUAL_PRODUCT_GFLOPS, USUAL_GFLOPS, USUAL_GBYTES_PER_S = 200e3, 20e3, 1e3
"""Rates of usual launches: beside them other work lasts as long as two."""
StressBuilds = Callable[[Candidate, Sequence[int], bool], Sequence[Build]]
"""Builds of a candidate with delays, one a seed; whether delays may differ from pass to pass, for shared memory."""
Sanitize = Callable[[Tool, Job, float], str]
"""What a tool of the sanitizer finds in a job within this many seconds, in one line; empty where nothing."""


@dataclass(frozen=True)
class Facilities:
    """What the sessions of one GPU share.

    patience: time limits are this many times the usual ones, where others have the GPU too. turns: those of processes
    that take turns on it.
    """

    workers: CudaWorkers
    sms: int
    stress_builds: StressBuilds
    patience: float = 1.0
    sanitize: Sanitize = sanitizer.findings
    turns: Turns = ALONE


@dataclass(frozen=True)
class Layout:
    """How tensors lie: snug, `gap` bytes before their mapping ends, or as timed launches have them."""

    snug: bool
    gap: int = 0


class CudaSession(GpuSession):
    """One candidate loaded in a worker; the arena is laid out for the sizes of each case, snug until `as_timed`."""

    def __init__(
        self, candidate: Candidate, build: Build, arena: CudaArena, cases: Cases, facilities: Facilities
    ) -> None:
        self.candidate, self.build, self.sms = candidate, build, facilities.sms
        self.task, self.cases, self.arena = cases.task, cases, arena
        self._layout = self._laid_out = Layout(snug=True)
        self._facilities = facilities
        self._segments = Segments(facilities.workers.helpers)
        self.worker = facilities.workers.get(arena)
        self.programmatic = self.plan_for(self.task).programmatic
        self.constant = contract.parse_cuda(candidate.source).constant
        self._load(self.task)

    def _load(self, task: Task) -> None:
        """Lay the arena out for these sizes, and have the worker launch for them."""
        plan, most = self.plan_for(task), self.arena.workspace_bytes
        self.require_room(task, plan.workspace_bytes, most)
        self._laid_out = self._layout
        self.arena.select(task, snug=self._layout.snug, gap=self._layout.gap)
        self.plan, self._places = plan, self.arena.places(plan)
        self._side_by_side = [
            {name: Place("staging", start) for name, start in starts.items()}
            for starts in side_by_side(task, self.cases.rng)
        ]
        self._place = 0
        self._segments.fill(self.arena.outside())
        self.timeout_s = self._limit_s(slowest_s(task))
        self._use(self.build)
        self.arena.fill_workspaces(persistent=True)

    def _use(self, build: Build, *, guarded: bool = False) -> None:
        """Launch this build of the candidate from now on: at every place, side by side, and a product on A as B too.

        guarded: where inputs and weights can only be read.
        """
        first = self._places[0]
        on_one = [{**first, "b": first["a"]}] if self.task.product else []
        elsewhere = [{**first, **places} for places in self._side_by_side]
        self.worker.load(Path(build.artifact), self.plan, [*self._places, *elsewhere, *on_one], guarded=guarded)

    def _call(self, op: str, timeout_s: float, *, alone: bool = False, **terms: Any) -> None:
        """Have the worker do something in a turn of its own on the GPU.

        alone: with nothing of other processes between its launches, which would take what one left for the next.
        """
        with self._facilities.turns.taken(alone=alone):
            self.worker.call(op, timeout_s, **terms)

    def _limit_s(self, work_s: float) -> float:
        """The time limit of launches that may take this long."""
        return self._facilities.patience * (LAUNCH_TIMEOUT_S + work_s)

    def plan_for(self, task: Task) -> Plan:
        return contract.plan_cuda(self.candidate.source, task, self.sms)

    def require_served(self, task: Task) -> None:
        self.plan_for(task)

    def as_timed(self) -> None:
        if self._layout.snug:
            self._layout = Layout(snug=False)
            self._load(self.task)

    def as_shifted(self, gap: int) -> None:
        self._layout = Layout(snug=True, gap=gap)

    def places(self) -> Sequence[int]:
        self._lay_out(self.task)
        return self.arena.covering(self.cases.rng)

    def launch(self, case: Case, prefill: Outputs | None = None, *, keep: bool = False) -> Outputs:
        (found,) = self._launched([Turn(case, prefill=prefill, keep=keep)])
        return found

    def launch_each(self, turns: Iterable[Turn[C]]) -> Iterator[tuple[Turn[C], Outputs]]:
        """As many at once as there is room for: every message costs the device two changes between processes."""
        left = iter(turns)
        for first in left:
            self._lay_out(first.case.task)
            some = [first, *itertools.islice(left, self.arena.in_a_row - 1)]
            yield from zip(some, self._launched(some), strict=True)

    def _launched(self, turns: Sequence[Turn[Any]]) -> Iterator[Outputs]:
        """The outputs of launches that one message asks for.

        The first finds its tensors in place, for the others the worker takes them from the staging buffer, where it
        also leaves what each but the last left of its inputs. What lies around is looked at behind the last one.
        """
        self._lay_out(turns[0].case.task)
        arena, sent = self.arena, list[dict[str, Any]]()
        # what this process writes, and what it must find afterwards
        here, left = list[Segment](), list[Segment]()
        room, guards = arena.address(Place("staging", 0)), arena.workspace_guards()

        def staged(segment: Segment) -> Segment:
            """The same bytes in the staging buffer."""
            nonlocal room
            room += rounded_up(segment.bytes, TENSOR_ALIGN)
            return segment._replace(address=room - rounded_up(segment.bytes, TENSOR_ALIGN))

        for number, turn in enumerate(turns):
            written, kept = self._before(turn), arena.records_of(number, self._place)
            held = arena.held(turn.case.tensors, self._place)
            if number == 0:
                here, written = written, []
            else:  # what another launch of the row did to guards stays there until the look at the end
                written = [segment for segment in written if segment not in guards]
            for index, segment in enumerate(written):
                if segment.source:
                    here.append(staged(segment))
                    written[index] = segment._replace(source=here[-1].address)
            if number < len(turns) - 1:
                copies = [staged(segment) for segment in held]
                kept += [copy._replace(source=own.address) for copy, own in zip(copies, held, strict=True)]
                held = copies
            left += held
            sent.append(self._message(written, kept, spoil=not turn.keep))
        self._segments.fill(here)
        limit_s = self._limit_s(len(turns) * slowest_s(arena.task))
        self._call("launch", limit_s, alone=any(turn.keep for turn in turns), turns=sent)
        found, complete = self._recorded(len(turns), left)
        for outputs in found:
            for output in () if complete else arena.task.outputs:
                require_written(output, outputs[output.name])
            yield outputs

    def launch_behind_producer(
        self, old: Case, case: Case, late: Tensor, between: int = 0, *, ordinary: bool = False
    ) -> Outputs:
        if late in case.task.outputs:
            self._fill(case)
            self.arena.stage(late, poisoned(late, self.arena.tensor(late).device))
        else:
            self._fill(case, {late.name: old.tensors[late.name]})
            self.arena.stage(late, case.tensors[late.name])
        torch.cuda.synchronize()
        place = self._places[self._place][late.name]
        terms: dict[str, Any] = {"source": ["staging", 0], "target": [place.buffer, place.offset]}
        self._call_behind(between, size=late.bytes, ordinary=ordinary, **terms)
        return self._result(case)

    def launch_before_reader_ends(self, case: Case, output: Tensor, between: int = 0) -> Outputs:
        self._fill(case)
        place = self._places[self._place][output.name]
        terms: dict[str, Any] = {"source": [place.buffer, place.offset], "target": ["record", 0]}
        self._call_behind(between, size=output.bytes, ordinary=False, **terms)
        if not all(self._segments.hold([self.arena.copied_poison(output)])):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "it was written already")
        return self._result(case)

    def _call_behind(self, between: int, *, ordinary: bool, **terms: Any) -> None:
        """Launch behind a slow kernel and `between` others.

        Half of the times the last of these is the candidate itself, where it has another place with other outputs: a
        launch that ends before the one ahead of it has would let the next one begin too early. It is not always there:
        one that lets the next one begin late would make up for a wait that the next one lacks. Only a product's reads
        guard bytes as inputs; another task's reads the launch's own, since garbage may be no index.
        """
        arena, others = self.arena, list[int]()
        if between and not ordinary and self.cases.rng.integers(2):
            outputs, given = arena.task.outputs, () if arena.task.product else arena.task.given
            used, read = ([arena.place(each, self._place) for each in tensors] for tensors in (outputs, given))
            others = [
                place
                for place in range(len(self._places))
                if set(used).isdisjoint(arena.place(output, place) for output in outputs)
                and read == [arena.place(each, place) for each in given]
            ]
        own = [others[int(self.cases.rng.integers(len(others)))]] if others else []
        restored = [segment for place in own for segment in arena.unwritten(place)]
        terms |= {"ns": PRODUCER_NS * (1 + between), "between": between, "ordinary": ordinary}
        terms |= {"bindings": [*own, self._place], "restored": [arena.shared(segment) for segment in restored]}
        self._call("after_slow", self.timeout_s, **terms)

    def launch_often(self, case: Case, count: int) -> Iterator[Outputs]:
        most = int(OFTEN_S / usual_s(case.task))
        looks = max(1, min(LOOKS, most // LEAST_OFTEN, self.arena.records))
        count = max(LEAST_OFTEN, min(count, most // looks))
        self._fill(case)
        terms: dict[str, Any] = {"run": -(-count // REPLAYS), "replays": REPLAYS, "looks": looks}
        terms |= {"stride": self.arena.record_stride}
        terms |= {"outputs": self.arena.written(self._place), "binding": self._place}
        limit_s = self._limit_s(looks * (count + REPLAYS) * slowest_s(case.task))
        self._call("launch_often", limit_s, alone=True, **terms)
        yield from map(self.arena.recorded, range(looks))
        yield self._result(case)

    def launch_watched(self, case: Case) -> Outputs:
        self._fill(case)
        elsewhere = self.arena.elsewhere()
        self._segments.fill(elsewhere)
        self._call("launch", self.timeout_s, turns=[self._message([], [], spoil=True)])
        if not all(self._segments.hold(elsewhere)):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, OUTSIDE)
        return self._result(case)

    def launch_guarded(self, case: Case) -> Outputs:
        self._lay_out(case.task)
        self._use(self.build, guarded=True)
        try:
            found = self.launch(case)
        except Fault as fault:
            if fault.status is not VerdictStatus.CRASHED:
                raise
            reason = "writes to its inputs or weights, if only what they hold: others may read them meanwhile"
            raise CheckFailed(VerdictStatus.UNHYGIENIC, f"{reason} ({fault.reason})") from None
        self._use(self.build)
        return found

    def launch_on_one(self, case: Case) -> Outputs:
        self._fill(case, place=0)
        turn = self._message([], [], spoil=True) | {"binding": len(self._places) + len(self._side_by_side)}
        self._call("launch", self.timeout_s, turns=[turn])
        return self._result(case)

    def launch_side_by_side(self, case: Case) -> Iterator[list[Outputs]]:
        self._fill(case, place=0)
        arena, turns, moved = self.arena, list[dict[str, Any]](), list[list[Segment]]()
        most = min(arena.records, max(1, MESSAGE_TENSORS // len(case.task.tensors)))
        for number, places in enumerate([{}, *self._side_by_side]):
            to = {arena.address(self._places[0][name]): arena.address(place) for name, place in places.items()}
            written = [
                segment._replace(address=to.get(segment.address, segment.address), source=here)
                for segment in arena.before_launch(case.tensors)
                for here in [segment.address if segment.source else 0]
            ]
            records = arena.records_of(number % most, 0)
            kept = [segment._replace(source=to.get(segment.source, segment.source)) for segment in records]
            binding = len(self._places) + number - 1 if number else 0
            turns.append(self._message(written, kept, spoil=True) | {"binding": binding})
            held = arena.held(case.tensors)
            moved.append([segment._replace(address=to.get(segment.address, segment.address)) for segment in held])
        for start in range(0, len(turns), most):
            some = turns[start : start + most]
            self._call("launch", self._limit_s(len(some) * slowest_s(case.task)), turns=some)
            # what all but the last left in the staging buffer has been written since
            self._require_kept([*arena.held(case.tensors), *moved[start + len(some) - 1]])
            yield [arena.recorded(number) for number in range(len(some))]

    def launch_beside_load(self, case: Case, count: int) -> Outputs:
        self._fill(case)
        terms: dict[str, Any] = {"count": count, "occupied": 0.5, "ns": BESIDE_NS, "binding": self._place}
        self._call("loaded_launches", self.timeout_s * count, **terms)
        return self._result(case)

    def launch_stressed(self, case: Case, seeds: Sequence[int], count: int) -> Iterator[Outputs]:
        """The last outputs of each seed's build are those of several launches with nothing between them.

        What cannot be built or launched with delays, for lack of registers or shared memory, is launched without them.
        """
        arena = self.arena
        kept: dict[str, Any] = {"stride": arena.record_stride, "scratch": self._scratch()}
        limit_s = self._limit_s(count * (slowest_s(case.task) + STRESS_S))
        load: dict[str, Any] = {"occupied": 0.5, "ns": BESIDE_NS + int(2e9 * usual_s(case.task))}
        stress_builds = partial(self._facilities.stress_builds, self.candidate, seeds)
        for build in delayed(stress_builds, self._use) or [self.build]:
            self._use(build)
            for start in range(0, count, arena.records):
                batch = min(count - start, arena.records)
                self._fill(case)
                where: dict[str, Any] = {"outputs": arena.written(self._place), "binding": self._place}
                self._call("record_loaded", limit_s, count=batch, **where, **kept, **load)
                self._result(case)
                yield from map(arena.recorded, range(batch))
            self._fill(case)
            self._call("loaded_launches", limit_s, count=BACK_TO_BACK, binding=self._place, **load)
            yield self._result(case)
        self._use(self.build)

    def sanitizes(self) -> bool:
        """Who else runs the sanitizer for this session has made sure."""
        return self._facilities.sanitize is not sanitizer.findings or sanitizer.works()

    def sanitize(self, tool: Tool, task: Task, case: Case | None) -> str:
        with given_file(task, case.tensors if case else None) as given:
            job = sanitizer.job(tool, Path(self.build.artifact), self.plan_for(task), task, given)
            return self._facilities.sanitize(tool, job, self._facilities.patience * SANITIZER_TIMEOUT_S)

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self._facilities.workers.renew()  # whatever failed may have left something behind

    def _scratch(self) -> list[list[Any]]:
        """Buffer, offset and bytes of each scratch workspace."""
        places = [(self._places[0][w.name], w.bytes) for w in self.plan.workspaces if not w.persistent]
        return [[place.buffer, place.offset, size] for place, size in places]

    def _lay_out(self, task: Task) -> None:
        if self.arena.task != task or self._laid_out != self._layout:
            self._load(task)

    def _fill(self, case: Case, values: Outputs | None = None, place: int | None = None) -> None:
        """Write tensors, and what all else holds before a launch, at a place, or any.

        values: those that some inputs have in place of the case's.
        """
        self._lay_out(case.task)
        self._segments.fill(self._before(Turn(case), values, place))

    def _before(self, turn: Turn[Any], values: Outputs | None = None, place: int | None = None) -> list[Segment]:
        """What is to be written before a launch, at the place that is its own from now on."""
        before = self._place
        if place is not None:
            self._place = place
        elif turn.place is not None:
            self._place = turn.place
        elif not turn.keep:
            self._place = int(self.cases.rng.integers(len(self._places)))
        scratch = [] if turn.keep else self.arena.scratch()
        tensors = {**turn.case.tensors, **(values or {})}
        left = self.arena.left(before, self._place)  # no byte of it lies where the place has its own
        return [*left, *self.arena.before_launch(tensors, turn.prefill, self._place), *scratch]

    def _message(self, written: Sequence[Segment], kept: Sequence[Segment], *, spoil: bool) -> dict[str, Any]:
        """A launch at the place of now, as the worker takes it."""
        fill, keep = ([self.arena.shared(segment) for segment in segments] for segments in (written, kept))
        return {"fill": fill, "spoil": spoil, "plain": bool(self.constant), "binding": self._place, "keep": keep}

    def _result(self, case: Case) -> Outputs:
        """The outputs of a launch where it wrote them, once everything else is found as it must be."""
        self._require_kept(self.arena.held(case.tensors, self._place))
        found = {name: output.clone() for name, output in self.arena.outputs(self._place).items()}
        for output in case.task.outputs:
            require_written(output, found[output.name])
        return found

    def _recorded(self, count: int, inputs: Sequence[Segment]) -> tuple[list[Outputs], bool]:
        """Copies of the outputs of `count` launches, and whether these surely hold no poison.

        The kernel that looks at what lies around copies and searches them too.
        """
        arena, poisons = self.arena, {POISON_WORDS[output.dtype] & 0xFFFF for output in self.arena.task.outputs}
        there = arena.recorded_bytes(count)
        copied = torch.empty_like(there)
        word = next(iter(poisons))
        unwritten = self._require_kept(inputs, Copied(there.data_ptr(), len(there), word, copied.data_ptr()))
        return [arena.recorded(number, copied) for number in range(count)], len(poisons) == 1 and not unwritten

    def _require_kept(self, inputs: Sequence[Segment], copied: Copied = NOTHING) -> bool:
        """CheckFailed where launches left anything but what they must; whether a word is in what is copied."""
        guards, persistent = self.arena.after_launch(self._place)
        kept, there = self._segments.look([*guards, *persistent, *inputs], copied)
        if not all(kept[: len(guards)]):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, OUTSIDE)
        if not all(kept[len(guards) : len(guards) + len(persistent)]):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, NOT_RESTORED)
        if not all(kept[len(guards) + len(persistent) :]):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "changed its inputs or weights")
        return there


def delayed(stress_builds: Callable[[bool], Sequence[Build]], load: Callable[[Build], None]) -> list[Build]:
    """Builds with delays that can be launched, those whose delays differ from pass to pass if they can; else none."""
    for counted in (True, False):
        builds = stress_builds(counted)
        if all(build.status is BuildStatus.BUILT for build in builds):
            try:
                load(builds[0])
                return list(builds)
            except Fault as fault:
                if fault.status is not VerdictStatus.FORBIDDEN:
                    raise
    return []


def usual_s(task: Task) -> float:
    """About what one launch takes."""
    if task.product:
        return task.flops / USUAL_PRODUCT_GFLOPS * 1e-9
    return task.flops / USUAL_GFLOPS * 1e-9 + task.bytes / USUAL_GBYTES_PER_S * 1e-9
