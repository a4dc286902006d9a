"""Searchers over a recorded task, all behind one interface: proposers of ours, and Kernel Tuner's strategies."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cuda_l2.propose._base import Maker, Values, proposer_maker, proposer_names
from cuda_l2.propose._recorded import RecordedSpace
from cuda_l2.propose._transfer import NearestProposer, fitted_on
from cuda_l2.propose._weights import Weights, load
from cuda_l2.propose.boosted import BoostedProposer
from cuda_l2.propose.schedule import SchedulePolicy
from cuda_l2.records import Candidate, Task, Trial
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported

KERNEL_TUNER = "kernel-tuner"
SCHEDULE, FROZEN, NEAREST, TRANSFER = "schedule", "frozen", "nearest", "transfer"
GROUP = 8
"""Candidates that a proposer gives at once, as in a search."""
TAKE_FIRST = ("genetic_algorithm",)
"""Strategies of Kernel Tuner that are given the default schedule to begin with; most refuse one."""
STALLED = 8
"""Groups in turn without a new schedule after which a searcher is taken to have ended."""


class Replay:
    """One search of a recorded task: which schedules were measured, in order. Each counts once."""

    def __init__(self, space: RecordedSpace, judge: Callable[[Candidate], Trial], most: int) -> None:
        """most: measurements after which the search ends; no more than there are schedules."""
        self.space, self._judge = space, judge
        self.most = min(most, len(space.by_values))
        self.order: dict[Values, Trial] = {}

    @property
    def left(self) -> int:
        return self.most - len(self.order)

    def measure(self, candidate: Candidate) -> Trial:
        """The recorded trial of a candidate."""
        trial = self._judge(candidate)
        self.order.setdefault(self.space.values_of(trial), trial)
        return trial


Searcher = Callable[[Replay, np.random.Generator], None]
"""Measures until nothing is left, or until it has nothing more to measure."""


@dataclass(frozen=True)
class Known:
    """What searchers may know of other tasks. A task that is held out is not among them."""

    spaces: Sequence[RecordedSpace]
    seed: int = 0


def searcher(name: str, known: Known, held_out: Sequence[Task]) -> Searcher:
    """The searcher of a name, as `names` lists them. UserError where there is none, or it has seen a held-out task."""
    kind, _, detail = name.partition(":")
    if kind == KERNEL_TUNER:
        return functools.partial(_kernel_tuner, _strategy(detail))
    if kind in (SCHEDULE, FROZEN):
        weights = load(Path(detail)) if detail else None
        if weights:
            _require_unseen(name, weights, held_out)
        return _by_proposer(functools.partial(_policy, weights, kind == SCHEDULE))
    if detail or kind not in (*proposer_names(), NEAREST, TRANSFER):
        raise UserError(f"there is no searcher {name!r}; choose from {', '.join(names())}")
    if kind == NEAREST:
        return _by_proposer(lambda space, trials, rng: NearestProposer(space, rng, known.spaces))
    if kind == TRANSFER:
        imported("sklearn", "the searcher transfer needs", "worlds")
        prior = fitted_on(known.spaces, known.seed)
        return _by_proposer(functools.partial(BoostedProposer, prior=prior))
    return _by_proposer(proposer_maker(kind))


def names() -> list[str]:
    """What a searcher may be called; FILE is of weights, NAME of a strategy."""
    return [*proposer_names(), f"{SCHEDULE}:FILE", FROZEN, f"{FROZEN}:FILE", NEAREST, TRANSFER, f"{KERNEL_TUNER}:NAME"]


def _policy(
    weights: Weights | None,
    learns: bool,
    space: RecordedSpace,
    trials: Callable[[], list[Trial]],
    rng: np.random.Generator,
) -> SchedulePolicy:
    if weights and [family.name for family in weights.families] != [family.name for family in space.families]:
        raise UserError("the weights are of other families than the world: train them from a world with the same")
    return SchedulePolicy(space, trials, rng, learns, weights)


def _require_unseen(name: str, weights: Weights, held_out: Sequence[Task]) -> None:
    seen = sorted({str(task) for task in held_out} & set(weights.tasks))
    if seen:
        raise UserError(
            f"{name} learnt from {', '.join(seen[:3])}, which is held out here: train it with the same --held-out"
        )


def _by_proposer(make: Maker | Callable[..., Any]) -> Searcher:
    def run(replay: Replay, rng: np.random.Generator) -> None:
        proposer = make(replay.space, lambda: list(replay.order.values()), rng)
        stalled = 0
        while replay.left > 0 and stalled < STALLED:
            before = len(replay.order)
            candidates = proposer.propose(min(GROUP, replay.left))
            proposer.observe([replay.measure(candidate) for candidate in candidates])
            stalled = 0 if len(replay.order) > before else stalled + 1

    return run


def _strategy(name: str) -> Any:
    interface = imported("kernel_tuner.interface", "Kernel Tuner's strategies need", "worlds")
    if name not in interface.strategy_map:
        known = ", ".join(sorted(filter(None, interface.strategy_map)))
        raise UserError(f"Kernel Tuner has no strategy {name!r}; choose from {known}")
    return interface.strategy_map[name]


def _kernel_tuner(strategy: Any, replay: Replay, rng: np.random.Generator) -> None:
    """Let one of Kernel Tuner's strategies search the recorded schedules, with its own defaults.

    Its search space is made from the schedules themselves, as from a cache file; the default schedule is the first
    where the strategy takes a first one. Its unique evaluations are our measurements.
    """
    interface = imported("kernel_tuner.interface", "Kernel Tuner's strategies need", "worlds")
    searchspace = imported("kernel_tuner.searchspace", "Kernel Tuner's strategies need", "worlds")
    util = imported("kernel_tuner.util", "Kernel Tuner's strategies need", "worlds")
    schedules = list(replay.space.by_values)
    columns = {f"p{i}": sorted({values[i] for values in schedules}) for i in range(len(schedules[0]))}
    cache = {",".join(map(str, values)): dict(zip(columns, values, strict=True)) for values in schedules}
    space = searchspace.Searchspace(None, None, None, from_cache={"tune_params": columns, "cache": cache})
    defaults = replay.space.defaults()
    first = {"x0": list(defaults[0])} if defaults and strategy._name in TAKE_FIRST else {}
    options = interface.Options(
        strategy_options=interface.Options(first),
        objective=["time"],
        objective_higher_is_better=[False],
        verbose=False,
        tune_params=columns,
        restrictions=None,
        budget=util.TuningBudget(None, replay.most),
    )
    with _seeded(int(rng.integers(1 << 31))):
        strategy.tune(space, _runner(replay, util, columns), options)


def _runner(replay: Replay, util: Any, columns: dict[str, list[int]]) -> Any:
    base = imported("kernel_tuner.runners.runner", "Kernel Tuner's strategies need", "worlds").Runner

    class RecordedRunner(base):  # type: ignore[misc, valid-type]
        """Gives the recorded time of each schedule in milliseconds."""

        def get_device_info(self) -> None:
            return None

        def get_environment(self, tuning_options: Any) -> dict[str, Any]:
            return {}

        def run(self, parameter_space: Sequence[Values], tuning_options: Any) -> list[dict[str, Any] | None]:
            return [self._one(tuple(values), tuning_options.budget) for values in parameter_space]

        def _one(self, values: Values, budget: Any) -> dict[str, Any] | None:
            if budget.is_done():
                return None
            before = len(replay.order)
            trial = replay.measure(replay.space.render(values, KERNEL_TUNER))
            budget.add_evaluations(len(replay.order) - before)
            result: dict[str, Any] = dict(zip(columns, values, strict=True))
            if trial.timing and trial.timing.candidate:
                return result | {"time": trial.timing.candidate.latency_us.estimate / 1000}
            return result | {"__error__": util.RuntimeFailedConfig()}

    return RecordedRunner()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Kernel Tuner draws from the global generators: seed them, and put them back."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
