"""The search baseline of Optuna: a tree-structured Parzen estimator.

Each choice is a position in its list of valid values, between 0 and 1, because the list depends on the
choices before and Optuna's categories may not.
"""

from collections.abc import Callable, Sequence

import numpy as np
import optuna

from cuda_l2.propose._base import Proposer, Space
from cuda_l2.records import Candidate, Trial

STARTUP_TRIALS = 16


class TpeProposer(Proposer):
    """Optuna's TPE behind the proposer interface."""

    name = "tpe"

    def __init__(self, space: Space, trials: Callable[[], list[Trial]], rng: np.random.Generator) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(
            seed=int(rng.integers(1 << 31)), n_startup_trials=STARTUP_TRIALS, constant_liar=True
        )
        self._space = space
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._asked: list[optuna.trial.Trial] = []

    def propose(self, count: int) -> list[Candidate]:
        self._asked = [self._study.ask() for _ in range(count)]
        return [self._space.render(self._values(trial), self.name) for trial in self._asked]

    def observe(self, trials: Sequence[Trial]) -> None:
        for asked, trial in zip(self._asked, trials, strict=False):
            self._study.tell(asked, trial.reward)

    def _values(self, trial: optuna.trial.Trial) -> tuple[int, ...]:
        values: list[int] = []
        for choice in self._space.choices:
            valid = self._space.valid(values)
            position = trial.suggest_float(choice.name, 0.0, 1.0)
            values.append(valid[min(int(position * len(valid)), len(valid) - 1)])
        return tuple(values)


PROPOSER = TpeProposer
