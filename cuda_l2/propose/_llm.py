"""Proposes the files of a language model under the launch contract, with a few turns to repair failures.

Its memory is the archive: trials give exemplars and failures; exchanges give answers that were paid for but never
judged, and conversations that still have turns for repair.
"""

import collections
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cuda_l2.contract.text import contract_text
from cuda_l2.llm._base import Message, Messages, Outcome
from cuda_l2.llm.client import WINDOW_SHARE, Client, Question
from cuda_l2.llm.exchanges import Exchange
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.llm.thoughts import without_thoughts
from cuda_l2.machine._base import Target
from cuda_l2.propose import _prompt, _question
from cuda_l2.propose._answer import Answer, Fault, parse_answer
from cuda_l2.propose._base import Proposer
from cuda_l2.propose._references import query
from cuda_l2.records import Candidate, Task, Trial
from cuda_l2.system.text import counted

FRUITLESS_ROUNDS = 6
"""After this many rounds in a row without a new candidate the model is not asked any more."""
LEAST_ANSWER, USUAL_ANSWER = 200, 1000
"""Tokens of the shortest kernels, and of most: a model on this machine is asked only what its pace leaves time for."""
ANSWER_SHOWN_TOKENS = 16_000
"""Limit of a model's own answer in a question to repair it."""
NO_CODE = "Your answer held no code. Give the whole file in one fenced block that begins with the contract comment."
CUT_OFF = "Your answer was cut off before the file was whole. Think less, write a shorter file, and close its fence."
_FAULTS = {Fault.NO_CODE: NO_CODE, Fault.CUT_OFF: CUT_OFF}


@dataclass(frozen=True)
class Asking:
    """How a proposer asks: what is called meanwhile, and when a proposal ends.

    on_wait: called before a model is asked. on_note: called with one line on what the model has time for. one_round: a
    proposal is one round of questions, also where no answer holds code, for callers who count answers.
    """

    on_wait: Callable[[], None] = lambda: None
    on_note: Callable[[str], None] = lambda note: None
    one_round: bool = False


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
        asking: Asking = Asking(),
    ) -> None:
        self.name = client.model.name
        self._size = self.group = client.settings.concurrency
        self._task, self._target, self._client, self._templates = task, target, client, templates
        self._sources, self._rng, self._asking, self._note = sources, rng, asking, ""
        self._faults: collections.Counter[str] = collections.Counter()
        self._group: list[Exchange] = []
        self._left_out: collections.Counter[str] = collections.Counter()
        self._repairs: collections.deque[tuple[Exchange, list[str]]] = collections.deque()
        self._unjudged: collections.deque[Exchange] = collections.deque()
        self._left = 0  # of the group, when the time was up
        self._fruitless = 0
        self._known: set[str] = set()
        self._designs: dict[str, str] = {}  # by candidate
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
                exchanges = self._ask(self._timely(self._questions(count)))
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
            if candidates or self._asking.one_round:
                return candidates
        self._group = []
        return []

    def observe(self, trials: Sequence[Trial]) -> None:
        self._left = len(self._group) - len(trials)
        for exchange, trial in zip(self._group, trials, strict=False):
            self._known.add(trial.candidate.id)
            if _question.failed(trial):
                self._mend(exchange, *self._feedback(exchange, trial))

    @property
    def fruitless(self) -> int:
        return self._faults.total()

    def conversations(self) -> list[Messages]:
        return [(*exchange.messages, Message("assistant", exchange.reply.text)) for exchange in self._group]

    def summary(self) -> str:
        faults = [f"{counted(count, 'answer')} {fault}" for fault, count in sorted(self._faults.items())]
        left = self._left + len(self._unjudged)
        unjudged = [f"{counted(left, 'answer')} not judged yet: the next search begins with them"] if left else []
        short = " and ".join(counted(count, name.removesuffix("s")) for name, count in self._left_out.items())
        fitted = f"; left out of prompts for want of tokens: {short}" if short else ""
        unasked = not self._client.outcomes and not self._client.reused and time.perf_counter() >= self.deadline
        why = self._ended or ("the time was up before the first question" if unasked else "")
        ended = f"; ended: {why}" if why else ""
        return ", ".join([self._client.summary(), *faults, *unjudged]) + fitted + ended

    def _ask(self, questions: Sequence[Question]) -> list[Exchange]:
        if not questions:
            return []
        self._asking.on_wait()
        start = time.perf_counter()
        try:
            return self._client.ask(str(self._task), self._target.machine, questions, self.deadline)
        finally:
            self.waited_s += time.perf_counter() - start

    def _time_left_s(self) -> float:
        limit_s, left_s = self._client.settings.model_seconds, self.deadline - time.perf_counter()
        return left_s if limit_s is None else min(left_s, limit_s - self._client.budget.seconds)

    def _timely(self, questions: list[Question]) -> list[Question]:
        """The questions that can be answered in the time left, by the model's measured pace; says once how many."""
        pace = None
        if math.isfinite(self._time_left_s()):
            self._asking.on_wait()
            pace = self._client.model.pace()
        left_s = self._time_left_s()
        if pace is None:
            return questions
        count = self._client.model.count_tokens
        prompts = [sum(count(message.text) for message in question.messages) for question in questions]

        def answers_tokens(asked: int) -> int:
            reading_s = max(prompts[:asked]) * asked / pace.read_tokens_s  # shorter ones of a batch are padded
            return max(0, int((left_s - reading_s) * pace.written_tokens_s))

        most = self._client.settings.answer_tokens
        least, usual = min(LEAST_ANSWER, most), min(USUAL_ANSWER, most)
        asked = next((n for n in range(len(questions), 1, -1) if answers_tokens(n) >= usual), 1)
        note = (
            f"{self.name} reads {pace.read_tokens_s:.3g} tokens a second here and writes {pace.written_tokens_s:.3g}:"
            f" in {left_s:.0f} s {counted(asked, 'prompt')} of {max(prompts[:asked]):,} tokens and"
            f" {min(answers_tokens(asked), most):,} of an answer"
        )
        if answers_tokens(asked) < least:
            self._ended = f"{note}, too few for a kernel; give more time, or take a smaller model or a GPU"
            return []
        if not self._note:
            self._note = note
            self._asking.on_note(note)
        return questions[:asked]

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
        self._remember(answer)
        return answer

    def _remember(self, answer: Answer) -> None:
        if answer.source:
            self._designs[Candidate(answer.source).id] = answer.design or "(no design given)"

    def _mend(self, exchange: Exchange, *feedback: str) -> None:
        """Queue a repair. feedback: the first that fits is sent."""
        if exchange.turn < self._client.settings.repairs:
            self._repairs.append((exchange, [*feedback]))

    def _feedback(self, exchange: Exchange, trial: Trial) -> list[str]:
        """The outcome of a failing kernel, first with the contract in full where that was not shown and refused it."""
        said, full = _prompt.feedback(trial), contract_text(self._target.name, self._task, full=True)
        if not _question.breaks_contract(trial) or any(full in message.text for message in exchange.messages):
            return [said]
        return [f"{said}\n\nThe launch contract in full:\n\n{full}", said]

    def _questions(self, count: int) -> list[Question]:
        questions: list[Question] = []
        while self._repairs and len(questions) < count:
            exchange, said = self._repairs.popleft()
            shown = _cut(without_thoughts(exchange.reply.text), 3 * ANSWER_SHOWN_TOKENS)
            limit, count_tokens = self._client.prompt_tokens(), self._client.model.count_tokens
            made = (self._templates.repair(exchange.messages, shown, each, limit, count_tokens) for each in said)
            if messages := next(filter(None, made), None):
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
            full_contract=settings.contract == "long",
            profile=self._sources.profile,
            references=lambda failures: self._sources.references(query(self._task, self._target, failures)),
            designs=self._designs,
        )
        limit = beginning_tokens(settings, model.window)
        return self._templates.ask(parts, limit, model.count_tokens, self._left_out)

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
            self._remember(answer)
            open_end = exchange.key not in gone_on and exchange in kept[-self._size :]
            trial = trials.get(Candidate(answer.source).id) if answer.source else None
            if answer.source and trial is None:
                self._unjudged.append(exchange)
            elif answer.fault is not None and open_end:
                self._mend(exchange, _FAULTS[answer.fault])
            elif trial is not None and _question.failed(trial) and open_end:
                self._mend(exchange, *self._feedback(exchange, trial))
        self._known = set(trials)


def beginning_tokens(settings: ModelSettings, window: int | None) -> int:
    """The most tokens of a conversation's beginning."""
    return settings.prompt_tokens if window is None else min(settings.prompt_tokens, int(WINDOW_SHARE * window))


def _cut(text: str, limit_chars: int) -> str:
    return text if len(text) <= limit_chars else f"{text[:limit_chars]}\n[the rest is left out]"
