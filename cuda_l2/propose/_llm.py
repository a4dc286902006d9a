"""Proposes the files of a language model under the launch contract, with a few turns to repair failures.

Its memory is the archive: trials give exemplars and failures; exchanges give answers that were paid for but never
judged, and conversations that still have turns for repair.
"""

import collections
import time
from collections.abc import Callable, Sequence

import numpy as np

from cuda_l2.llm._base import Message, Messages, Outcome
from cuda_l2.llm.client import WINDOW_SHARE, Client, Question
from cuda_l2.llm.exchanges import Exchange
from cuda_l2.machine._base import Target
from cuda_l2.propose import _prompt, _question
from cuda_l2.propose._answer import Answer, Fault, parse_answer
from cuda_l2.propose._base import Proposer
from cuda_l2.propose._references import query
from cuda_l2.records import Candidate, Task, Trial
from cuda_l2.system.text import counted

FRUITLESS_ROUNDS = 6
"""After this many rounds in a row without a new candidate the model is not asked any more."""
ANSWER_SHOWN_TOKENS = 16_000
"""Limit of a model's own answer in a question to repair it."""
NO_CODE = "Your answer held no code. Give the whole file in one fenced block that begins with the contract comment."
CUT_OFF = "Your answer was cut off before the file was whole. Think less, write a shorter file, and close its fence."
_FAULTS = {Fault.NO_CODE: NO_CODE, Fault.CUT_OFF: CUT_OFF}


class LlmProposer(Proposer):
    """Asks a model for a group of kernels at a time."""

    def __init__(
        self,
        task: Task,
        target: Target,
        client: Client,
        templates: _prompt.Templates,
        sources: _question.Sources,
        rng: np.random.Generator,
        *,
        on_wait: Callable[[], None] = lambda: None,
        one_round: bool = False,
    ) -> None:
        """on_wait: called before a model is asked.

        one_round: a proposal is one round of questions, also where no answer holds code, for callers who count answers.
        """
        self.name = client.model.name
        self._size = self.group = client.settings.concurrency
        self._task, self._target, self._client, self._templates = task, target, client, templates
        self._sources, self._rng, self._on_wait, self._one_round = sources, rng, on_wait, one_round
        self._faults: collections.Counter[str] = collections.Counter()
        self._group: list[Exchange] = []
        self._repairs: collections.deque[tuple[Exchange, str]] = collections.deque()
        self._unjudged: collections.deque[Exchange] = collections.deque()
        self._left = 0  # of the group, when the time was up
        self._fruitless = 0
        self._known: set[str] = set()
        self._ended = ""
        self._recall()

    def propose(self, count: int) -> list[Candidate]:
        """At most a group; fewer where answers hold no code; none where the model gives nothing more."""
        count = min(count, self._size)
        while not self._over():
            asked = self._client.outcomes.total()
            if self._unjudged:
                exchanges = [self._unjudged.popleft() for _ in range(min(count, len(self._unjudged)))]
            else:
                exchanges = self._ask(self._questions(count))
            self._group = []
            candidates: list[Candidate] = []
            for exchange in exchanges:
                answer = self._read(exchange)
                if answer is not None and answer.source:
                    self._group.append(exchange)
                    candidates.append(Candidate(answer.source, self.name))
            new = {candidate.id for candidate in candidates} - self._known
            self._known |= new
            # stored answers do not show that the model has nothing new
            paid = bool(candidates) or self._client.outcomes.total() > asked
            self._fruitless = 0 if new else self._fruitless + paid
            if candidates or self._one_round:
                return candidates
        self._group = []
        return []

    def observe(self, trials: Sequence[Trial]) -> None:
        self._left = len(self._group) - len(trials)
        for exchange, trial in zip(self._group, trials, strict=False):
            self._known.add(trial.candidate.id)
            if _question.failed(trial):
                self._mend(exchange, _prompt.feedback(trial))

    @property
    def fruitless(self) -> int:
        return self._faults.total()

    def conversations(self) -> list[Messages]:
        return [(*exchange.messages, Message("assistant", exchange.reply.text)) for exchange in self._group]

    def summary(self) -> str:
        faults = [f"{counted(count, 'answer')} {fault}" for fault, count in sorted(self._faults.items())]
        left = self._left + len(self._unjudged)
        unjudged = [f"{counted(left, 'answer')} not judged yet: the next search begins with them"] if left else []
        unasked = not self._client.outcomes and not self._client.reused and time.perf_counter() >= self.deadline
        why = self._ended or ("the time was up before the first question" if unasked else "")
        ended = f"; ended: {why}" if why else ""
        return ", ".join([self._client.summary(), *faults, *unjudged]) + ended

    def _ask(self, questions: Sequence[Question]) -> list[Exchange]:
        self._on_wait()
        start = time.perf_counter()
        try:
            return self._client.ask(str(self._task), self._target.machine, questions, self.deadline)
        finally:
            self.waited_s += time.perf_counter() - start

    def _over(self) -> bool:
        if self._fruitless >= FRUITLESS_ROUNDS:
            last = f", at last: {self._client.failure}" if self._client.failure else ""
            self._ended = f"nothing new in {self._fruitless} rounds of questions{last}"
        now = time.perf_counter()
        if not self._unjudged and now + self._client.fastest_s > self.deadline > now:
            self._ended = f"the time left is too short for an answer, the fastest took {self._client.fastest_s:.1f} s"
        return now >= self.deadline or bool(self._ended or (self._client.ended and not self._unjudged))

    def _read(self, exchange: Exchange) -> Answer | None:
        """The answer of an exchange; a fault is counted and queued for repair. None where there is no answer."""
        if exchange.reply.outcome is not Outcome.ANSWERED:
            return None
        answer = parse_answer(exchange.reply.text, exchange.reply.finish)
        if answer.fault is not None:
            self._faults[answer.fault] += 1
            self._mend(exchange, _FAULTS[answer.fault])
        return answer

    def _mend(self, exchange: Exchange, feedback: str) -> None:
        if exchange.turn < self._client.settings.repairs:
            self._repairs.append((exchange, feedback))

    def _questions(self, count: int) -> list[Question]:
        questions: list[Question] = []
        while self._repairs and len(questions) < count:
            exchange, feedback = self._repairs.popleft()
            shown = _cut(exchange.reply.text, 3 * ANSWER_SHOWN_TOKENS)
            messages = self._templates.repair(
                exchange.messages, shown, feedback, self._client.prompt_tokens(), self._client.model.count_tokens
            )
            if messages:
                questions.append(Question(messages, exchange.key, exchange.turn + 1))
        history = self._sources.trials() if len(questions) < count else []
        while len(questions) < count:
            questions.append(Question(self._begin(history)))
        return questions

    def _begin(self, history: Sequence[Trial]) -> Messages:
        """The beginning of a new conversation; each has exemplars of its own."""
        settings, model = self._client.settings, self._client.model
        parts = _question.parts(
            self._task,
            self._target,
            history,
            self._rng,
            exemplars=settings.exemplars,
            profile=self._sources.profile,
            references=lambda failures: self._sources.references(query(self._task, self._target, failures)),
        )
        limit = settings.prompt_tokens
        if model.window is not None:
            limit = min(limit, int(WINDOW_SHARE * model.window))
        return self._templates.ask(parts, limit, model.count_tokens)

    def _recall(self) -> None:
        """Take from the archive the answers that were never judged, and failures with turns left."""
        kept = self._client.log.exchanges(
            purpose=self._client.purpose, task=str(self._task), machine=self._target.machine, model=self.name
        )
        trials = {trial.candidate.id: trial for trial in self._sources.trials()}
        gone_on = {exchange.parent for exchange in kept}
        for exchange in kept:
            if exchange.reply.outcome is not Outcome.ANSWERED:
                continue
            answer = parse_answer(exchange.reply.text, exchange.reply.finish)
            open_end = exchange.key not in gone_on and exchange in kept[-self._size :]
            trial = trials.get(Candidate(answer.source).id) if answer.source else None
            if answer.source and trial is None:
                self._unjudged.append(exchange)
            elif answer.fault is not None and open_end:
                self._mend(exchange, _FAULTS[answer.fault])
            elif trial is not None and _question.failed(trial) and open_end:
                self._mend(exchange, _prompt.feedback(trial))
        self._known = set(trials)


def _cut(text: str, limit_chars: int) -> str:
    return text if len(text) <= limit_chars else f"{text[:limit_chars]}\n[the rest is left out]"
