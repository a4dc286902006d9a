"""Opens the policy that a user names, and the policy that chooses among schedules of kernel families."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cuda_l2.families._base import families_for
from cuda_l2.llm._base import is_model
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.machine._base import Target
from cuda_l2.propose._base import Hooks, Policy, Proposer, Trials, proposer_maker, space_for
from cuda_l2.records import Candidate, Task
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place

TRAINED = "schedule"
"""The policy that weights are of."""


class FamilyPolicy(Policy):
    """Chooses among the schedules of the kernel families that serve a task."""

    def __init__(self, name: str, weights: Path | None = None) -> None:
        """UserError where there is no such policy or what it needs is not installed. weights: of `schedule`."""
        self.name, self._maker = name, proposer_maker(name)
        self._weights = None
        if weights is not None:
            if name != TRAINED:
                raise UserError(f"weights are of the policy {TRAINED}, not of {name}")
            from cuda_l2.propose._weights import load  # noqa: PLC0415 - loads torch

            self._weights = load(weights)

    def proposer(
        self, task: Task, target: Target, trials: Trials, rng: np.random.Generator, hooks: Hooks = Hooks()
    ) -> Proposer:
        families, weights = families_for(task, target), self._weights
        if weights is None and self.name == TRAINED:
            from cuda_l2.propose._weights import shipped  # noqa: PLC0415 - loads torch

            found = shipped()
            weights = found if found and families and found.suit(task, families, target) else None
        if weights is None:
            return self._maker(space_for(families, task, target), trials, rng)
        from cuda_l2.propose.schedule import SchedulePolicy  # noqa: PLC0415 - loads torch

        if self._weights and target.machine not in weights.machines:
            learnt = ", ".join(weights.machines)
            print(f"cuda-l2: the weights learnt from {learnt}; this machine is {target.machine}", file=sys.stderr)
        return SchedulePolicy(weights.space(task, target), trials, rng, weights=weights)


def default_candidates(task: Task, target: Target) -> list[Candidate]:
    """The schedules that an engineer would try first; none where no family serves the task."""
    families = families_for(task, target)
    if not families:
        return []
    space = space_for(families, task, target)
    return [space.render(values, "default") for values in space.defaults()]


def open_policy(
    name: str,
    settings: ModelSettings,
    archive: Place,
    purpose: str = "propose",
    hidden: Callable[[str], bool] = lambda text: False,
    *,
    anew: bool = False,
    weights: Path | None = None,
) -> Policy:
    """The policy that a user names: a language model as KIND:NAME, or a proposer. UserError where it cannot be used.

    weights: of a trained schedule policy. The other arguments concern language models alone, see `ModelPolicy`.
    """
    if not is_model(name):
        return FamilyPolicy(name, weights)
    if weights is not None:
        raise UserError(f"weights are of the policy {TRAINED}, not of {name}")
    from cuda_l2.propose._model_policy import ModelPolicy  # noqa: PLC0415 - parts of it are optional

    return ModelPolicy(name, settings, archive, purpose, hidden, anew=anew)
