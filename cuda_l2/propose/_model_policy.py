"""A language model as a policy."""

import sys
from collections.abc import Callable

import numpy as np

from cuda_l2.llm._base import open_model
from cuda_l2.llm.client import Client
from cuda_l2.llm.exchanges import ExchangeLog
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.machine._base import Target
from cuda_l2.propose._base import Hooks, Policy, Trials
from cuda_l2.propose._llm import Asking, LlmProposer
from cuda_l2.propose._prompt import Templates
from cuda_l2.propose._question import Sources
from cuda_l2.propose._references import excerpts
from cuda_l2.records import Task
from cuda_l2.retrieve.index import Index
from cuda_l2.system import sandbox
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place


class ModelPolicy(Policy):
    """A model, its budget and the log of exchanges. UserError where any of it cannot be used.

    hidden: whether a piece of headers or of the user's folders must not be shown, as it is held out. anew: questions
    that an earlier run asked are asked again, and a proposal is one round of questions.
    """

    def __init__(
        self,
        policy: str,
        settings: ModelSettings,
        archive: Place,
        purpose: str = "propose",
        hidden: Callable[[str], bool] = lambda text: False,
        *,
        anew: bool = False,
    ) -> None:
        require_sandbox(settings.without_sandbox)
        self._templates = Templates(settings.prompts)
        self._client = Client(open_model(policy, settings), ExchangeLog(archive), settings, purpose)
        self._client.require_budget()
        self._hidden, self._anew = hidden, anew
        self._index = open_index() if settings.reference_tokens else None
        self.name = self._client.model.name

    def proposer(
        self, task: Task, target: Target, trials: Trials, rng: np.random.Generator, hooks: Hooks = Hooks()
    ) -> LlmProposer:
        if self._anew:
            self._client.count_answered(str(task), target.machine)
        return LlmProposer(
            *(task, target, self._client, self._templates),
            Sources(trials, lambda query: self._excerpts(target, query), hooks.profile),
            rng,
            Asking(lambda: hooks.on_stage(f"waiting for {self.name}"), _say, self._anew),
        )

    def summary(self) -> str:
        return self._client.summary()

    def close(self) -> None:
        self._client.close()
        if self._index:
            self._index.close()

    def _excerpts(self, target: Target, query: str) -> list[str]:
        if self._index is None:
            return []
        model, tokens = self._client.model, self._client.settings.reference_tokens
        return excerpts(self._index, target, query, tokens, model.count_tokens, self._hidden)


def require_sandbox(without: bool) -> None:
    """UserError where nothing shuts a model's kernels off from the file system, unless the user accepts that."""
    if sandbox.kind() is sandbox.Kind.LIMITS and not without:
        raise UserError(
            "a language model's kernels are built only where a sandbox shuts them off from the file system, which"
            " this machine lacks: apt install bubblewrap, or accept the risk with --without-sandbox"
        )


def open_index() -> Index | None:
    """The index of headers, where there is one; says that prompts go without where there is none."""
    try:
        return Index()
    except UserError as error:
        _say(f"prompts go without excerpts of headers: {error}")
        return None


def _say(note: str) -> None:
    print(f"cuda-l2: {note}", file=sys.stderr, flush=True)
