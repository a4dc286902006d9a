"""Makes the parts of a question to a model from the task, the machine and the archive's trials."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from cuda_l2.contract.text import contract_text
from cuda_l2.machine._base import Target
from cuda_l2.propose import _prompt
from cuda_l2.propose._exemplars import sample_exemplars
from cuda_l2.records import BuildStatus, Task, TimingStatus, Trial
from cuda_l2.system.text import fenced
from cuda_l2.tasks import describe

FAILURES_SHOWN, ANSWERS_SHOWN = 3, 8


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
    full_contract: bool = False,
    profile: Callable[[Trial], str] = lambda trial: "",
    references: Callable[[Sequence[Trial]], Sequence[str]] = lambda failures: (),
    designs: Mapping[str, str] = MappingProxyType({}),
) -> _prompt.Parts:
    """The parts of a new conversation's beginning. `exemplars` scored kernels are drawn anew each time.

    full_contract: the long one. profile: the hardware's counters of a kernel as text. references: excerpts, given the
    failures shown. designs: what a model wrote of its kernels' design, by candidate.
    """
    best = max((trial for trial in history if _scored(trial)), key=lambda trial: trial.reward, default=None)
    failures = latest_failures(history)
    return _prompt.Parts(
        contract=contract_text(target.name, task, full=full_contract),
        machine=_prompt.describe_machine(target, task),
        task=describe(task),
        standing=_prompt.describe_standing(best, target),
        profile=fenced(text) if best and (text := profile(best)) else "",
        exemplars=[_prompt.describe_exemplar(trial) for trial in drawn_exemplars(history, exemplars, rng)],
        failures=[_prompt.describe_failure(trial) for trial in failures],
        references=references(failures),
        history=_prompt.describe_answers(history, designs, ANSWERS_SHOWN),
    )


def drawn_exemplars(history: Sequence[Trial], count: int, rng: np.random.Generator) -> list[Trial]:
    """Scored kernels from distinct score buckets, the best first: the best of all stands in place of the best drawn."""
    scored = [(trial.reward, trial) for trial in history if _scored(trial)]
    drawn = sorted(sample_exemplars(scored, count, rng), key=lambda pair: -pair[0])
    if drawn:
        drawn[0] = max(scored, key=lambda pair: pair[0])
    return [trial for _, trial in drawn]


def latest_failures(history: Sequence[Trial]) -> list[Trial]:
    """The latest failures, with reasons of their own."""
    latest = {trial.reason: trial for trial in history if failed(trial) and trial.reason}
    return list(latest.values())[-FAILURES_SHOWN:]


def _scored(trial: Trial) -> bool:
    return bool(trial.speedup) and not math.isnan(trial.reward)


def breaks_contract(trial: Trial) -> bool:
    """Whether a rule of the launch contract refused a trial's candidate."""
    return trial.build.status is BuildStatus.REFUSED


def failed(trial: Trial) -> bool:
    return trial.timing is None or trial.timing.status is not TimingStatus.MEASURED
