"""Tunes many shapes from nothing in minutes: a trained policy says which few kernels to build and which few to time.

    python examples/tune_from_scratch.py --out FOLDER
    python examples/tune_from_scratch.py --grid 64x4096x4096,128x4096x4096 --beside TABLE --out FOLDER

Round 1: for each shape and layout the policy ranks candidate schedules, most likely first (beyond M N K of 2^32 the
families' models do). A few hundred kernels are built that hold many of the early guesses of many shapes, and the first
of a shape's guesses that are among them are timed. Round 2: the same with other candidates too, changed copies of a
shape's best and the best of shapes alike; what was measured of a shape corrects the policy there, and its best are
timed once more. Plain launches, fp32 sums, both layouts. Writes times-1.csv, times-2.csv and schedules.csv, a dispatch
table. Goes on where it was stopped, with the same settings; what failed before is tried again then. --beside then times
the winners, in one run, beside what a table names for the shape (beside.csv). Needs a Hopper GPU. docs/learning.md has
what it gave.
"""

import argparse
import heapq
import itertools
import json
import math
import multiprocessing
import pickle
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cuda_l2 import contract
from cuda_l2.build.build_server import BuildServers
from cuda_l2.families._base import Choice, Schedule
from cuda_l2.library.table import PLAIN, Named, Row, family_of, joined, read_table, read_times, write_table
from cuda_l2.machine.cuda import target as cuda
from cuda_l2.machine.cuda.driver import bus_id
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.measure.quick import Item, QuickTimer
from cuda_l2.propose._base import FamilySpace, UnionSpace, Values, mutated
from cuda_l2.propose._network import Question, ScheduleNetwork
from cuda_l2.propose._weights import LARGEST, SHIPPED, Weights, load
from cuda_l2.records import Accumulate, BuildStatus, Candidate, Gemm, Layout
from cuda_l2.runs.grid import read_grid, shuffled
from cuda_l2.runs.shortlist import distance
from cuda_l2.system.errors import MachineError, UserError
from cuda_l2.system.files import csv_text, read_text, write_text
from cuda_l2.system.lock import machine_lock

Space = FamilySpace | UnionSpace
RANKED, DRAWN = (256, 96), (64, 32)
"""Candidates of a shape in either round: by the families' models, and random ones."""
PARENTS, CHILDREN, ALIKE = 3, 120, 24
"""In round 2 also changed copies of a shape's best, and the two best of the shapes most like it."""
VIEW = 64
"""Length of a list of guesses: of one shape and layout."""
LATER, ENOUGH = 0.94, 0.55
"""Guess r of a list adds LATER^r ENOUGH^h to the worth of its kernel, where h of its kernels are chosen already."""
NEAR, PRIOR = 1.5, 0.3
"""A measured schedule that differs in d choices corrects another with the weight exp(-d / NEAR); the median of all
corrections has the weight PRIOR."""
UNSURE = 1.02
"""The time of a launch that was no finalist is multiplied by this: the least of many such times is low by chance."""
FINALISTS, AGAIN = 5, 3
"""The fastest launches of a shape and layout that the timer's second pass repeats, one fewer of long ones; the fastest
of round 1 that round 2 times again, in both passes."""
LEAST_SAMPLES = (7, 31)
"""Samples of a long launch in that pass, at least, in round 1 and 2: with 7, differences of 1 % are chance."""
KEPT_EVERY = 50
"""Sizes between two writes of the times so far."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A schedule of one shape, launched plainly, and the kernel that it compiles to."""

    family: str
    schedule: Named
    kernel: str


Times = dict[Guess, float]
"""Microseconds."""
Timings = dict[Gemm, Times]


class Guesser:
    """Ranks schedules of a shape. target: the machine; times: what round 1 measured."""

    def __init__(self, weights: Weights, target: CudaTarget, times: Mapping[Gemm, Times]) -> None:
        self._weights, self._target, self._times = weights, target, times
        self._best = {gemm: sorted(own, key=own.__getitem__)[:2] for gemm, own in times.items()}
        self._networks: dict[tuple[Choice, ...], ScheduleNetwork] = {}

    def guesses(self, gemm: Gemm) -> list[Guess]:
        """The most likely first, without what was measured."""
        space, measured = self._weights.space(gemm, self._target), self._times.get(gemm, {})
        later = bool(self._times)
        rng = np.random.default_rng((gemm.m, gemm.n, gemm.k, gemm.layout is Layout.TN, later))
        whole: dict[tuple[str, Named], Values] = {}
        for guess in measured:
            whole[guess.family, guess.schedule] = _whole(space, guess.schedule, guess.family)
        if later:
            others = (other for other in self._best if other.layout is gemm.layout and other != gemm)
            alike = sorted(others, key=lambda other: distance(other, gemm))[:ALIKE]
            for guess in itertools.chain.from_iterable(self._best[other] for other in alike):
                if self._valid(guess, gemm):
                    whole.setdefault((guess.family, guess.schedule), _whole(space, guess.schedule, guess.family))
        new = [*space.ranked(RANKED[later]), *space.some(DRAWN[later], rng)]
        for guess in sorted(measured, key=measured.__getitem__)[:PARENTS]:
            parent = whole[guess.family, guess.schedule]
            children = [mutated(space, parent, rng) for _ in range(CHILDREN)]
            new += [mutated(space, child, rng) if i % 2 else child for i, child in enumerate(children)]
        for values in new:
            if plain := self._plain(space, values):
                whole.setdefault(plain, _whole(space, plain[1], plain[0]))
        slow = self._slowness(space, list(whole.values()), list(measured.values()))
        open_ = [(float(score), named) for score, named in zip(slow, whole, strict=True)][len(measured) :]
        first = [named for _, named in sorted(open_)[:VIEW]]
        return [Guess(*named, self._kernel(gemm, *named)) for named in first]

    def _slowness(
        self, space: Space, schedules: Sequence[Values], measured_us: Sequence[float]
    ) -> NDArray[np.floating]:
        """The logarithm of each schedule's time, less a constant, by the policy or, beyond LARGEST, by the families'
        models; corrected by the first ones, which were measured."""
        network = self._network(space)
        inputs = network.encoder(space, schedules)
        gemm = space.task
        if isinstance(gemm, Gemm) and gemm.m * gemm.n * gemm.k <= LARGEST:
            with torch.no_grad():
                _, fast = network([Question(inputs, torch.ones(len(schedules), dtype=torch.bool))])
            slow: NDArray[np.float32] = -fast[0].numpy()
        else:
            slow = inputs[:, 0].numpy()
        if not measured_us:
            return slow
        values = np.array(schedules)
        off = np.log(measured_us) - slow[: len(measured_us)]
        off -= off.min()
        apart = (values[:, None] != values[None, : len(measured_us)]).sum(2)
        weight = np.exp(-apart / NEAR)
        correction: NDArray[np.floating] = (weight @ off + PRIOR * np.median(off)) / (weight.sum(1) + PRIOR)
        return slow + correction

    def _network(self, space: Space) -> ScheduleNetwork:
        if space.choices not in self._networks:
            network = ScheduleNetwork(space.choices)
            network.load_state_dict(self._weights.state)
            self._networks[space.choices] = network
        return self._networks[space.choices]

    def _plain(self, space: Space, values: Values) -> tuple[str, Named] | None:
        """A schedule as it is launched plainly."""
        family, own = space.split(values)
        named = {**family.named(own)}
        named |= {name: 0 for name in ("EDGE", "PDL") if name in named}
        try:
            schedule = Schedule(family, space.task, self._target, family.values(named))
        except ValueError:
            return None
        return family.name, tuple(schedule.named.items())

    def _valid(self, guess: Guess, gemm: Gemm) -> bool:
        if not family_of(guess.family).serves(gemm, self._target):
            return False
        try:
            _schedule(guess.family, guess.schedule, gemm, self._target)
        except ValueError:
            return False
        return True

    def _kernel(self, gemm: Gemm, family: str, schedule: Named) -> str:
        made = _schedule(family, schedule, gemm, self._target)
        return contract.kernel_id(made.family.render(made, "policy").source)


def _schedule(family: str, schedule: Named, gemm: Gemm, target: CudaTarget) -> Schedule:
    return Schedule(family_of(family), gemm, target, tuple(value for _, value in schedule))


def _whole(space: Space, schedule: Named, family: str) -> Values:
    return space.whole(family, tuple(value for _, value in schedule))


def choose(
    guesses: Mapping[Gemm, Sequence[Guess]], most: int, held: Collection[str] = ()
) -> dict[str, tuple[Gemm, Guess]]:
    """Few kernels that hold many early guesses of many shapes, greedily, each with a guess that it serves.

    held: kernels that are there already.
    """
    users: defaultdict[str, list[tuple[Gemm, float, Guess]]] = defaultdict(list)
    for gemm, own in guesses.items():
        kernels = {guess.kernel: guess for guess in reversed(own)}
        for rank, kernel in enumerate(dict.fromkeys(guess.kernel for guess in own)):
            users[kernel].append((gemm, LATER**rank, kernels[kernel]))
    has: Counter[Gemm] = Counter()
    for kernel in held:
        has.update(gemm for gemm, _, _ in users.get(kernel, ()))

    def worth(kernel: str) -> float:
        return sum(value * ENOUGH ** has[gemm] for gemm, value, _ in users[kernel])

    heap = [(-worth(kernel), kernel) for kernel in users if kernel not in held]
    heapq.heapify(heap)
    chosen: dict[str, tuple[Gemm, Guess]] = {}
    while heap and len(chosen) < most:
        _, kernel = heapq.heappop(heap)
        now = -worth(kernel)  # no more than when it was pushed
        if heap and now > heap[0][0]:
            heapq.heappush(heap, (now, kernel))
            continue
        gemm, _, guess = users[kernel][0]
        chosen[kernel] = gemm, guess
        has.update(gemm for gemm, _, _ in users[kernel])
    return chosen


_GUESSER: list[Guesser] = []
"""State of a process that guesses."""


def _prepare(path: Path, target: CudaTarget, times: Mapping[Gemm, Times]) -> None:
    torch.set_num_threads(1)
    _GUESSER[:] = [Guesser(load(path), target, times)]


def _guesses(gemm: Gemm) -> list[Guess]:
    return _GUESSER[0].guesses(gemm)


class Tuning:
    """Shapes on one machine: guesses, kernels built, times."""

    def __init__(self, gemms: Sequence[Gemm], target: CudaTarget, weights: Path) -> None:
        self.gemms, self.target, self.weights = tuple(gemms), target, weights
        self.times: Timings = {}
        self._built: dict[str, str] = {}  # cubins by kernel
        self._refused: set[str] = set()  # kernels that do not build
        self._failed: set[tuple[Gemm, Guess]] = set()
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def round(self, kernels: int, tries: int, file: Path) -> None:
        """Guess, build and time once, or go on with what is left of it; then the times are in the file."""
        part = file.with_suffix(".part.csv")
        timings = self._read(file if file.exists() else part)
        if file.exists():
            self._take(timings)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.target.cores, context, _prepare, (self.weights, self.target, self.times)) as pool:
            guesses = dict(zip(self.gemms, pool.map(_guesses, self.gemms, chunksize=4), strict=True))
        for gemm, own in guesses.items():
            left = [guess for guess in own if guess.kernel not in self._refused and (gemm, guess) not in self._failed]
            guesses[gemm] = left
        again = {gemm: sorted(times, key=times.__getitem__)[:AGAIN] for gemm, times in self.times.items()}
        known = {guess.kernel: (gemm, guess) for gemm, times in self.times.items() for guess in times}
        chosen = choose(guesses, kernels, known.keys() | self._built.keys())
        missing = {kernel: found for kernel, found in {**known, **chosen}.items() if kernel not in self._built}
        self.say(f"guessed; {len(missing)} kernels to build")
        self._compile({kernel: self._row(*found).candidate(self.target) for kernel, found in missing.items()})
        tried = {gemm: [guess for guess in own if guess.kernel in self._built][:tries] for gemm, own in guesses.items()}
        both = {g: [*(old for old in again.get(g, ()) if old.kernel in self._built), *own] for g, own in tried.items()}
        self.say(f"built; {sum(map(len, both.values()))} launches to time")
        rest = {gemm: own for gemm, own in both.items() if gemm not in timings}
        try:
            for done, times in enumerate(self._timed(rest, again, LEAST_SAMPLES[bool(self.times)]), start=1):
                timings |= times
                if done % KEPT_EVERY == 0:
                    write_table(part, self._rows(timings))
        finally:
            write_table(part, self._rows(timings))
        self.say(f"timed; {len(self._refused)} kernels did not build, {len(self._failed)} launches failed")
        part.replace(file)
        self._take(timings)

    def _take(self, timings: Timings) -> None:
        """Learn a round's times. Those of before are scaled to this round's process and clock; what was to be timed
        again and has no time now is left out.
        """
        for gemm, times in timings.items():
            known = self.times.setdefault(gemm, {})
            for guess in sorted(known, key=known.__getitem__)[:AGAIN]:
                if guess not in times:
                    del known[guess]
            if ratios := [us / known[guess] for guess, us in times.items() if guess in known]:
                self.times[gemm] = known = {guess: us * float(np.median(ratios)) for guess, us in known.items()}
            known.update(times)

    def _read(self, path: Path) -> Timings:
        """A round's times from its file, none where there is none; UserError where it is damaged."""
        timings: Timings = {}
        rows = read_times(path) if path.exists() else []
        for row in rows:
            timings.setdefault(row.gemm, {})[self._guess(row)] = row.us
        if rows:
            self.say(f"read {len(rows)} times from {path}")
        return timings

    def _rows(self, timings: Timings) -> list[Row]:
        return [self._row(gemm, guess, us) for gemm, times in timings.items() for guess, us in times.items()]

    def table(self) -> list[Row]:
        """The fastest of each shape and layout."""
        best = {gemm: min(times.items(), key=lambda item: item[1]) for gemm, times in self.times.items() if times}
        return joined((), [self._row(gemm, guess, us) for gemm, (guess, us) in best.items()])

    def beside(self, rows: Iterable[Row]) -> list[tuple[Gemm, float, float]]:
        """Each shape with the microseconds of its winner and the least of a table's rows for it, from one run."""
        ours: dict[Gemm, Row] = {}
        for row in sorted(self.table(), key=lambda row: row.us):
            ours.setdefault(row.gemm.any_layout, row)
        theirs = [row for row in rows if row.edge == PLAIN and row.gemm.any_layout in ours]
        pairs = [(row.gemm, self._guess(row)) for row in theirs]
        mine = {size: (row.gemm, self._guess(row)) for size, row in ours.items()}
        named = zip([*ours.values(), *theirs], [*mine.values(), *pairs], strict=True)
        candidates = {guess.kernel: row.candidate(self.target) for row, (_, guess) in named}
        self._compile({kernel: candidate for kernel, candidate in candidates.items() if kernel not in self._built})
        tried: defaultdict[Gemm, list[Guess]] = defaultdict(list)
        for gemm, guess in [*mine.values(), *pairs]:
            if guess.kernel in self._built:
                tried[gemm].append(guess)
        once = {gemm: list(dict.fromkeys(own)) for gemm, own in tried.items()}
        times: Timings = {}
        for found in self._timed(once, once, LEAST_SAMPLES[-1]):
            times |= found
        least: dict[Gemm, float] = {}
        for gemm, guess in pairs:
            us = times.get(gemm, {}).get(guess, math.inf)
            least[gemm.any_layout] = min(us, least.get(gemm.any_layout, math.inf))
        both = [
            (size, times.get(gemm, {}).get(guess, math.inf), least.get(size, math.inf))
            for size, (gemm, guess) in mine.items()
        ]
        return [pair for pair in both if math.isfinite(pair[1] + pair[2])]

    def _guess(self, row: Row) -> Guess:
        return Guess(row.family, row.schedule, contract.kernel_id(row.candidate(self.target).source))

    def _row(self, gemm: Gemm, guess: Guess, us: float = math.nan) -> Row:
        return Row(gemm, PLAIN, guess.family, guess.schedule, us)

    def _compile(self, candidates: Mapping[str, Candidate]) -> None:
        servers = BuildServers(self.target)
        try:
            builds = servers.build(list(candidates.values()))
            for kernel, build in zip(candidates, builds, strict=True):
                if build.status is BuildStatus.BUILT:
                    self._built[kernel] = build.artifact
                else:
                    self._refused.add(kernel)
                    self.say(f"a kernel did not build: {build.reason}")
        finally:
            servers.close()

    def _timed(
        self, tried: Mapping[Gemm, Sequence[Guess]], finalists: Mapping[Gemm, Sequence[Guess]], samples: int
    ) -> Iterator[Timings]:
        """Size by size. finalists: timed in the second pass whatever the first gave. samples: their least number."""
        sizes: defaultdict[Gemm, list[tuple[Gemm, Guess]]] = defaultdict(list)
        for gemm, guesses in tried.items():
            sizes[gemm.any_layout] += [(gemm, guess) for guess in guesses]
        with machine_lock(bus_id()), QuickTimer(0, FINALISTS, least_rounds=samples) as timer:
            for size in shuffled(list(sizes), 0):
                items, found = [], dict[Gemm, Times]()
                for gemm, guess in sizes[size]:
                    source = self._row(gemm, guess).candidate(self.target).source
                    plan = pickle.dumps(contract.parse_cuda(source).plan(gemm, self.target.sms))
                    finalist = guess in finalists.get(gemm, ())
                    items.append(Item(gemm.layout, self._built[guess.kernel], plan, dependent=False, finalist=finalist))
                for (gemm, guess), sample in zip(sizes[size], timer.time(size, items), strict=True):
                    us = sample.final[0] if math.isfinite(sample.final[0]) else sample.first[0] * UNSURE
                    if math.isfinite(us):
                        found.setdefault(gemm, {})[guess] = round(us, 3)  # as it is kept
                    else:
                        self._failed.add((gemm, guess))
                        self.say(f"{gemm} {guess.family}: {sample.reason or 'no time'}")
                yield found


def _require_same(path: Path, settings: dict[str, object]) -> None:
    """UserError where the folder was begun with other settings, which are kept in this file."""
    if path.exists():
        try:
            before = dict(json.loads(read_text(path)))
        except (ValueError, TypeError):
            raise UserError(f"{path} is damaged: give another --out") from None
        if other := [name for name, value in settings.items() if before.get(name) != value]:
            raise UserError(f"{path.parent} was begun with other {', '.join(other)}: give another --out")
    write_text(path, json.dumps(settings, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", default="paper", help="paper (its 1,000 shapes), a file of shapes, or shapes")
    parser.add_argument("--rounds", type=int, choices=(1, 2), default=2)
    parser.add_argument("--kernels", type=int, default=300, help="kernels that a round builds at most")
    parser.add_argument("--tries", type=int, default=8, help="launches of a shape and layout that a round times")
    parser.add_argument("--weights", type=Path, default=SHIPPED, help="of a policy, if not the shipped one")
    parser.add_argument("--beside", type=Path, help="a table whose choices are timed beside the winners")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        if min(options.kernels, options.tries) < 1:
            raise UserError("--kernels and --tries are at least 1")
        gemms = read_grid(options.grid, tuple(Layout), Accumulate.FP32)
        if other := [gemm for gemm in gemms if (gemm.dtype, gemm.accumulate) != ("float16", Accumulate.FP32)]:
            raise UserError(f"{other[0]}: fp16 elements with fp32 sums alone are tuned here")
        theirs = [row for row in read_table(options.beside) if row.edge == PLAIN] if options.beside else []
        if options.beside and not {row.gemm for row in theirs} & set(gemms):
            raise UserError(f"{options.beside} names a plain launch for none of these shapes")
        target = cuda.detect()
        if not target.runs("sm_90a"):
            raise UserError("the kernels are for Hopper GPUs: one is needed")
        options.out.mkdir(parents=True, exist_ok=True)
        same = {
            "shapes": list(map(str, gemms)),
            "kernels": options.kernels,
            "tries": options.tries,
            "weights": load(options.weights).fingerprint,
            "machine": target.machine,
        }
        _require_same(options.out / "settings.json", same)
        tuning = Tuning(gemms, target, options.weights)
        files = [options.out / f"times-{number}.csv" for number in (1, 2)]
        for number, file in enumerate(files, start=1):
            if number <= options.rounds or file.exists():
                tuning.round(options.kernels, options.tries, file)
                if file == files[-1] or not files[-1].exists():
                    write_table(options.out / "schedules.csv", tuning.table())
        if theirs:
            pairs = tuning.beside(theirs)
            if not pairs:
                raise UserError("nothing was timed beside the table: see above")
            sizes = [(gemm.m, gemm.n, gemm.k, f"{us:.4f}", f"{theirs_us:.4f}") for gemm, us, theirs_us in pairs]
            write_text(options.out / "beside.csv", csv_text(("m", "n", "k", "us", "table_us"), sizes))
            shares = [other / mine for _, mine, other in pairs]
            print(
                f"{len(shares)} shapes: {sum(shares) / len(shares):.4f} of the table's speed, least {min(shares):.3f}"
            )
    except KeyboardInterrupt:
        return 130
    except (UserError, MachineError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
