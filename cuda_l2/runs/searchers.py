"""Searchers over a recorded task, all behind one interface: proposers of ours, and Kernel Tuner's strategies."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cuda_l2.llm._base import is_model, open_model
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.propose._asked import AskedProposer
from cuda_l2.propose._base import Maker, proposer_maker, proposer_names
from cuda_l2.propose._recorded import RecordedSpace
from cuda_l2.propose._transfer import NearestProposer, fitted_on
from cuda_l2.propose._weights import Weights, load
from cuda_l2.propose.boosted import BoostedProposer
from cuda_l2.propose.schedule import SchedulePolicy
from cuda_l2.records import Task, Trial
from cuda_l2.runs import kernel_tuner
from cuda_l2.runs.replay import Replay
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported

SCHEDULE, FROZEN, NEAREST, TRANSFER = "schedule", "frozen", "nearest", "transfer"
GROUP = 8
"""Candidates that a proposer gives at once, as in a search."""
STALLED = 8
"""Groups in turn without a new schedule after which a searcher is taken to have ended."""


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
    if kind == kernel_tuner.NAME:
        return functools.partial(kernel_tuner.run, kernel_tuner.strategy(detail))
    if kind in (SCHEDULE, FROZEN):
        weights = load(Path(detail)) if detail else None
        if weights:
            _require_unseen(name, weights, held_out)
        return _by_proposer(functools.partial(_policy, weights, kind == SCHEDULE))
    if is_model(name):
        model = open_model(name, ModelSettings())
        return _by_proposer(functools.partial(AskedProposer, model=model))
    if detail or kind not in (*proposer_names(), NEAREST, TRANSFER):
        raise UserError(f"there is no searcher {name!r}; choose from {', '.join(names())}")
    if kind == NEAREST:
        return _by_proposer(functools.partial(NearestProposer, known=known.spaces))
    if kind == TRANSFER:
        imported("sklearn", "the searcher transfer needs", "worlds")
        prior = fitted_on(known.spaces, known.seed)
        return _by_proposer(functools.partial(BoostedProposer, prior=prior))
    return _by_proposer(proposer_maker(kind))


def names() -> list[str]:
    """What a searcher may be called; FILE is of weights, NAME of a strategy or, with URL, of a language model."""
    return [
        *proposer_names(),
        f"{SCHEDULE}:FILE",
        FROZEN,
        f"{FROZEN}:FILE",
        NEAREST,
        TRANSFER,
        f"{kernel_tuner.NAME}:NAME",
        "openai:NAME@URL",
    ]


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
