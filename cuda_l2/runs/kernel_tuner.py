"""Kernel Tuner's own strategies on a recorded task, with their own defaults.

The search space is made from the recorded schedules, as from a cache file of theirs, and a strategy's unique
evaluations are our measurements.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from cuda_l2.propose._base import Values
from cuda_l2.runs.replay import Replay
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported

NAME = "kernel-tuner"
TAKE_FIRST = ("genetic_algorithm",)
"""Strategies that are given the default schedule to begin with; most refuse one."""
PATIENCE = 2_000
"""Schedules that a strategy may consider between two measurements: where children are never new some never end."""


def strategy(name: str) -> Any:
    """A strategy's module by name; UserError where there is none, or Kernel Tuner is not installed."""
    known = _module("interface").strategy_map
    if name not in known:
        raise UserError(f"Kernel Tuner has no strategy {name!r}; choose from {', '.join(sorted(filter(None, known)))}")
    return known[name]


def run(chosen: Any, replay: Replay, rng: np.random.Generator) -> None:
    """Let a strategy search until the measurements are spent; one that ends before begins anew, elsewhere.

    It ends for good where it begins anew and measures nothing new.
    """
    before = -1
    while replay.left > 0 and len(replay.order) > before:
        before = len(replay.order)
        _once(chosen, replay, int(rng.integers(1 << 31)))


def _once(chosen: Any, replay: Replay, seed: int) -> None:
    interface, util = _module("interface"), _module("util")
    schedules = list(replay.space.by_values)
    columns = {f"p{i}": sorted({values[i] for values in schedules}) for i in range(len(schedules[0]))}
    cache = {",".join(map(str, values)): dict(zip(columns, values, strict=True)) for values in schedules}
    space = _module("searchspace").Searchspace(None, None, None, from_cache={"tune_params": columns, "cache": cache})
    runner = _runner(replay, util, columns)
    space.is_param_config_valid = _impatient(space.is_param_config_valid, runner, util)
    first = replay.space.defaults()[:1] if chosen._name in TAKE_FIRST and not replay.order else []
    options = interface.Options(
        strategy_options=interface.Options({"x0": list(first[0])} if first else {}),
        objective=["time"],
        objective_higher_is_better=[False],
        verbose=False,
        tune_params=columns,
        restrictions=None,
        budget=util.TuningBudget(None, replay.left),
    )
    with _seeded(seed), suppress(util.StopCriterionReached):
        chosen.tune(space, runner, options)


def _runner(replay: Replay, util: Any, columns: dict[str, list[int]]) -> Any:
    base = _module("runners.runner").Runner
    last = len(replay.space.by_values) - 1

    class RecordedRunner(base):  # type: ignore[misc, valid-type]
        """Gives the recorded time of each schedule in milliseconds."""

        considered = 0  # since the last measurement
        evaluated = 0  # known schedules too

        def get_device_info(self) -> None:
            return None

        def get_environment(self, tuning_options: Any) -> dict[str, Any]:
            return {}

        def run(self, parameter_space: Sequence[Values], tuning_options: Any) -> list[dict[str, Any] | None]:
            if self.evaluated >= last:  # the genetic algorithm would wait forever for a second parent
                raise util.StopCriterionReached("as many evaluations as there are schedules")
            self.considered, self.evaluated = 0, self.evaluated + len(parameter_space)
            return [self._one(tuple(values), tuning_options.budget) for values in parameter_space]

        def _one(self, values: Values, budget: Any) -> dict[str, Any] | None:
            if budget.is_done():
                return None
            before = len(replay.order)
            trial = replay.measure(replay.space.render(values, NAME))
            budget.add_evaluations(len(replay.order) - before)
            result: dict[str, Any] = dict(zip(columns, values, strict=True))
            if trial.timing and trial.timing.candidate:
                return result | {"time": trial.timing.candidate.latency_us.estimate / 1000}
            return result | {"__error__": util.RuntimeFailedConfig()}

    return RecordedRunner()


def _impatient(valid: Callable[[Values], bool], runner: Any, util: Any) -> Callable[[Values], bool]:
    """The same check of a schedule; it ends the search where too many were considered and none measured."""

    def checked(values: Values) -> bool:
        runner.considered += 1
        if runner.considered > PATIENCE:
            raise util.StopCriterionReached("nothing new was found")
        return valid(values)

    return checked


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


def _module(name: str) -> Any:
    return imported(f"kernel_tuner.{name}", "Kernel Tuner's strategies need", "worlds")
