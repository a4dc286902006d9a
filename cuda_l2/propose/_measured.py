"""The sizes of a first question to a model, part by part, and what of it does not fit."""

import collections
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cuda_l2.llm._base import estimated_tokens, open_model
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.machine._base import Target
from cuda_l2.propose import _prompt, _question
from cuda_l2.propose._llm import beginning_tokens
from cuda_l2.propose._model_policy import open_index
from cuda_l2.propose._policy import default_candidates
from cuda_l2.propose._references import excerpts, query
from cuda_l2.records import Task, Trial
from cuda_l2.system.text import fenced


@dataclass(frozen=True, slots=True)
class Measured:
    """sizes: characters and tokens by part. limit: tokens that a first question may have.

    left_out: parts that it has no room for. defaults: whether exemplars are the families' first schedules, as no trial
    is known.
    """

    sizes: dict[str, tuple[int, int]]
    limit: int
    window: int | None
    left_out: dict[str, int]
    defaults: bool


def measured(task: Task, target: Target, history: Sequence[Trial], settings: ModelSettings, policy: str) -> Measured:
    """The sizes for a task whose trials these are. policy: the model whose tokens count, or empty for an estimate."""
    with contextlib.ExitStack() as held:
        model = open_model(policy, settings) if policy else None
        if model:
            held.callback(model.close)
        count_tokens = model.count_tokens if model else estimated_tokens
        index = open_index() if settings.reference_tokens else None

        def references(failures: Sequence[Trial]) -> list[str]:
            text = query(task, target, failures)
            return excerpts(index, target, text, settings.reference_tokens, count_tokens) if index else []

        parts = _question.parts(
            task,
            target,
            history,
            np.random.default_rng(),
            exemplars=settings.exemplars,
            full_contract=settings.contract == "long",
            references=references,
        )
        defaults = [] if parts.exemplars else default_candidates(task, target)[: settings.exemplars]
        if defaults:
            parts = replace(parts, exemplars=[fenced(each.source, "", len(each.source)) for each in defaults])
        templates, window = _prompt.Templates(settings.prompts), model.window if model else None
        limit = beginning_tokens(settings, window)
        left_out: collections.Counter[str] = collections.Counter()
        sent = templates.ask(parts, limit, count_tokens, left_out)
        sizes = templates.sizes(parts, count_tokens)
        sizes["all that is sent"] = sum(len(m.text) for m in sent), sum(count_tokens(m.text) for m in sent)
    return Measured(sizes, limit, window, dict(left_out), bool(defaults))
