"""Makes the parts of a question to a model from the task, the machine and the archive's trials."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cuda_l2.contract.text import contract_text
from cuda_l2.machine._base import Target
from cuda_l2.propose import _prompt
from cuda_l2.propose._exemplars import sample_exemplars
from cuda_l2.records import Task, TimingStatus, Trial
from cuda_l2.system.text import fenced
from cuda_l2.tasks import describe

FAILURES_SHOWN = 3


@dataclass(frozen=True)
class Sources:
    """The sources of a question beside the task and the machine.

    references: excerpts for a query. profile: the hardware's counters of a kernel as text, empty if there are none.
    """

    trials: Callable[[], list[Trial]]
    references: Callable[[str], list[str]] = lambda query: []
    profile: Callable[[Trial], str] = lambda trial: ""


def parts(
    task: Task,
    target: Target,
    history: Sequence[Trial],
    rng: np.random.Generator,
    *,
    exemplars: int,
    profile: Callable[[Trial], str] = lambda trial: "",
    references: Callable[[Sequence[Trial]], Sequence[str]] = lambda failures: (),
) -> _prompt.Parts:
    """The parts of a new conversation's beginning. `exemplars` scored kernels are drawn anew each time.

    profile: the hardware's counters of a kernel as text. references: excerpts, given the failures shown.
    """
    measured = [(trial.reward, trial) for trial in history if trial.speedup and not math.isnan(trial.reward)]
    best = max((trial for _, trial in measured), key=lambda trial: trial.speedup, default=None)
    shown = sample_exemplars(measured, exemplars, rng)
    latest = {trial.reason: trial for trial in history if failed(trial) and trial.reason}
    failures = list(latest.values())[-FAILURES_SHOWN:]  # with reasons of their own
    return _prompt.Parts(
        contract=contract_text(target.name, task),
        machine=_prompt.describe_machine(target, task),
        task=describe(task),
        standing=_prompt.describe_standing(best, target),
        profile=fenced(text) if best and (text := profile(best)) else "",
        exemplars=[_prompt.describe_exemplar(trial) for _, trial in sorted(shown, key=lambda pair: -pair[0])],
        failures=[_prompt.describe_failure(trial) for trial in failures],
        references=references(failures),
    )


def failed(trial: Trial) -> bool:
    return trial.timing is None or trial.timing.status is not TimingStatus.MEASURED
