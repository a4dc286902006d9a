"""A search among all configurations of cuBLASLt's algorithms within a time: the library without its heuristic.

What the heuristic returned comes first. Then neighbours of the fastest so far and random draws take turns; what the
library accepts is checked and timed once or twice. The fastest few and the heuristic's best are then timed in
interleaved rounds, as autotuning does. No algorithm that rounds parts of sums to the output's type takes part.
"""

import contextlib
import itertools
import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from cuda_l2.machine.cuda.driver import DriverError
from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.measure.configurations import Configuration, Space
from cuda_l2.measure.cublas import ROUNDED, Algorithm, CublasError, Launch, LtProduct
from cuda_l2.measure.launches import Buffers, on
from cuda_l2.measure.tuned import TunedLayout
from cuda_l2.measure.tuning import REHEAT_S, Tuner
from cuda_l2.system.errors import EndOfRunError, UserError
from cuda_l2.system.files import write_text

FINALISTS = 8
"""The fastest so far: their neighbours are tried. The last of them are timed in rounds with the heuristic's best."""
MOST_STALE = 5000
"""Proposals in a row that were tried before, after which a search ends."""
QUICK_US, QUICK_LAUNCHES = 100.0, 16
"""Device time of a quick sample, and how many launches it may have."""
SEED = 28
CHECKED = 4
"""Launches of a finalist, on different operands, that must be right after its rounds."""


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search among configurations found for one product and layout."""

    algorithm: Algorithm
    us: float  # in the finalists' rounds
    regret: float  # how much faster another finalist may be; see `selection`
    returned: bool  # whether the heuristic returns this algorithm too
    tried: int  # configurations that the library was asked about
    valid: int  # of these it accepted
    wrong: int  # of these failed to launch or gave wrong results
    seconds: float


@dataclass
class Found:
    """What a search has tried so far."""

    times_us: dict[str, float] = field(default_factory=dict)  # of right ones, by descriptor
    ranked: list[tuple[float, int, Algorithm]] = field(default_factory=list)  # the fastest first
    tried: set[Configuration] = field(default_factory=set)
    valid: int = 0
    wrong: int = 0


def find(
    space: Space,
    seeds: Sequence[Algorithm],
    check: Callable[[Configuration], Algorithm | None],
    time_us: Callable[[Algorithm], float],
    within_s: float,
    rng: np.random.Generator,
    clock: Clock = CLOCK,
) -> Found:
    """Try the seeds, then other configurations until the time is over or nothing new comes.

    check: the algorithm of a configuration, None where the library refuses it. time_us: of one launch, infinite where
    its result is wrong.
    """
    found, began = Found(), clock.now()

    def take(algorithm: Algorithm) -> None:
        if algorithm.data in found.times_us:
            return
        found.valid += 1
        us = found.times_us[algorithm.data] = time_us(algorithm)
        if math.isfinite(us):
            insort(found.ranked, (us, found.valid, algorithm))
        else:
            found.wrong += 1

    for algorithm in seeds:
        found.tried.add(algorithm.configuration)
        take(algorithm)
    stale = 0
    for configuration in _proposals(space, [each.id for each in seeds], found, rng):
        if clock.now() - began >= within_s or stale > MOST_STALE:
            break
        stale += 1
        if configuration in found.tried:
            continue
        stale = 0
        found.tried.add(configuration)
        made = check(configuration)
        if made and made.reduction not in ROUNDED:
            take(made)
    return found


def search(
    product: LtProduct,
    k: int,
    tuned: TunedLayout,
    tuner: Tuner,
    buffers: Buffers,
    right: Callable[[Launch, int], bool],
    within_s: float,
    faults: Path,
    clock: Clock = CLOCK,
) -> Searched | None:
    """The fastest right configuration of a product; None where all that were tried fail.

    tuned: what autotuning found. right: whether C is the product after each of a number of launches. Overwrites C.
    within_s: without the heuristic's algorithms and the finalists' rounds. faults: file of descriptors that are not
    launched but count as wrong. One that faults is added, or all finalists whose rounds do, with EndOfRunError.
    """
    began = clock.now()
    faulted = faults.read_text().split() if faults.exists() else []
    order = sorted(range(len(tuned.algorithms)), key=lambda number: (number != tuned.chosen, tuned.times_us[number]))
    seeds = [tuned.algorithms[number] for number in order if tuned.algorithms[number].reduction not in ROUNDED]
    launches = max(1, min(QUICK_LAUNCHES, round(QUICK_US / tuned.times_us[tuned.chosen])))

    def time_us(algorithm: Algorithm, checked: int = 1) -> float:
        if algorithm.data in faulted:
            return math.inf
        launch = product.launcher(algorithm)
        try:
            with _faults_kept([algorithm], faults):
                return tuner.quick(on(launch, buffers), launches) if right(launch, checked) else math.inf
        except CublasError:  # the library's check promises less than it says
            return math.inf

    known = [product.capabilities(each) for each in product.algorithm_ids()]
    space, rng = Space([each for each in known if each], k), np.random.default_rng(SEED)
    found = find(space, seeds, product.configured, time_us, within_s, rng, clock)
    best = [algorithm for *_, algorithm in found.ranked[:FINALISTS]]
    if seeds and seeds[0] not in best and math.isfinite(found.times_us[seeds[0].data]):
        best.append(seeds[0])
    if not best:
        return None
    with _faults_kept(best, faults):
        final = tuner.by_replays([on(product.launcher(each), buffers) for each in best], REHEAT_S)
    fastest = sorted(range(len(best)), key=lambda number: (number != final.chosen, final.times_us[number]))
    # right at times is wrong
    wrong = list(itertools.takewhile(lambda number: math.isinf(time_us(best[number], CHECKED)), fastest))
    if len(wrong) == len(best):
        return None
    number = fastest[len(wrong)]
    chosen = best[number]
    returned = any(each.data == chosen.data for each in tuned.algorithms)
    counts = len(found.tried), found.valid, found.wrong + len(wrong)
    return Searched(chosen, final.times_us[number], final.regret, returned, *counts, clock.now() - began)


@contextlib.contextmanager
def _faults_kept(launched: Sequence[Algorithm], faults: Path) -> Iterator[None]:
    """EndOfRunError where the driver fails, as after an illegal address; what was launched is added to a file."""
    try:
        yield
    except (CublasError, torch.cuda.OutOfMemoryError):
        raise
    except RuntimeError as error:
        if isinstance(error, DriverError) and error.of_machine:
            raise
        known = faults.read_text() if faults.exists() else ""
        advice = "run the command again: it goes on without this configuration"
        try:
            write_text(faults, known + "".join(f"{each.data}\n" for each in launched))
        except UserError as unwritten:
            advice = f"the next run may meet it again: {unwritten}"
        raise EndOfRunError(
            f"a configuration that --brute tried faulted ({' '.join(str(error).split())}), which ends the process;"
            f" {advice}"
        ) from error


def _proposals(space: Space, ids: Sequence[int], found: Found, rng: np.random.Generator) -> Iterator[Configuration]:
    """Neighbours of one of the fastest, then a draw: by turns of the heuristic's algorithms and of all."""
    queues: dict[str, list[Configuration]] = {}
    everything = space.ids
    if not everything:
        return
    favoured = [each for each in dict.fromkeys(ids) if each in everything] or everything
    for turn in itertools.count():
        leaders = found.ranked[:FINALISTS]
        if leaders:
            algorithm = leaders[int(rng.integers(len(leaders)))][2]
            if algorithm.data not in queues:
                near = list(space.neighbours(algorithm.configuration))
                queues[algorithm.data] = [near[int(index)] for index in rng.permutation(len(near))]
            if queues[algorithm.data]:
                yield queues[algorithm.data].pop()
        yield space.draw(everything if turn % 2 else favoured, rng)
