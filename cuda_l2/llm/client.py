"""Asks a model within a budget of tokens, money and time; keeps every exchange, and pays for no answer twice."""

import collections
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from cuda_l2.llm._base import Messages, Model, Outcome, Reply, Request
from cuda_l2.llm.exchanges import Exchange, ExchangeLog
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import counted, plain


@dataclass
class Budget:
    """The amounts spent, and whether the budget pays for one more question at its highest cost."""

    settings: ModelSettings
    tokens: int = 0
    seconds: float = 0.0
    money: float = 0.0  # stays 0 without prices

    @property
    def priced(self) -> bool:
        return self.settings.price_in is not None

    def cost(self, prompt_tokens: int, answer_tokens: int) -> float:
        """Cost in the unit of the prices; NaN without prices."""
        price_in, price_out = self.settings.price_in, self.settings.price_out
        if price_in is None or price_out is None:
            return math.nan
        return (prompt_tokens * price_in + answer_tokens * price_out) * 1e-6

    def refusal(self, prompt_tokens: int, answer_tokens: int) -> str:
        """Why the budget does not pay for this many tokens more, in one line; empty where it does."""
        tokens, money, seconds = self.settings.tokens, self.settings.money, self.settings.model_seconds
        if tokens is not None and self.tokens + prompt_tokens + answer_tokens > tokens:
            left = f"spent but for {tokens - self.tokens}" if self.tokens else "too small"
            return f"the budget of {tokens} tokens is {left}"
        if money is not None and self.money + self.cost(prompt_tokens, answer_tokens) > money:
            left = f"spent but for {money - self.money:.4g}" if self.money else "too small"
            return f"the budget of {money:g} is {left}"
        if seconds is not None and self.seconds >= seconds:
            return f"the budget of {seconds:g} s of waiting for the model is spent"
        return ""

    def spend(self, prompt_tokens: int, answer_tokens: int) -> None:
        self.tokens += prompt_tokens + answer_tokens
        if self.priced:
            self.money += self.cost(prompt_tokens, answer_tokens)


MAX_ANSWER_CHARS = 400_000
"""Limit of a stored answer."""
WINDOW_SHARE = 0.6
"""Share of a model's window for the prompt; the rest is for the answer and repairs."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question; `parent` is the key of the exchange that it continues."""

    messages: Messages
    parent: str = ""
    turn: int = 0


class Client(Closing):
    """One model and one budget. A context manager. purpose: the exchanges' purpose, as in propose or check."""

    def __init__(self, model: Model, log: ExchangeLog, settings: ModelSettings, purpose: str = "propose") -> None:
        self.model, self.log, self.settings, self.purpose = model, log, settings, purpose
        self.budget = Budget(settings)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.reused = 0
        self.ended = ""
        """Why no more questions can be paid for, in one line; empty while they can."""
        self.failure = ""
        """Reason of the last question without an answer."""
        self.fastest_s = 0.0
        """Seconds of the fastest answer so far; 0 before the first."""
        self._asked: collections.Counter[str] = collections.Counter()

    def require_budget(self) -> None:
        """UserError where not even an answer alone can be paid for."""
        if reason := self.budget.refusal(0, self.settings.answer_tokens):
            raise UserError(self._too_dear(reason, 0))

    def ask(
        self, task: str, machine: str, questions: Sequence[Question], deadline: float = math.inf, *, purpose: str = ""
    ) -> list[Exchange]:
        """The exchanges, in order; fewer than questions where the budget does not pay for all.

        purpose: another than the client's.

        UserError where the model has never answered and asking again would not help (a wrong key, an unknown host),
        where the budget does not pay for the first question, or where the disk is too full to keep an answer.
        """
        purpose = purpose or self.purpose
        keys = [self._key(question, purpose) for question in questions]
        found = [self.log.answered(key) for key in keys]
        new = self._affordable([i for i, stored in enumerate(found) if stored is None], questions)
        self.reused += len(questions) - found.count(None)
        answer_tokens, temperature = self.settings.answer_tokens, self.settings.temperature
        seeds = {i: int(hashlib.sha256(keys[i].encode()).hexdigest()[:12], 16) for i in new}
        requests = [Request(questions[i].messages, answer_tokens, temperature, seeds[i]) for i in new]
        start = time.perf_counter()
        if self.settings.model_seconds is not None:
            deadline = min(deadline, start + self.settings.model_seconds - self.budget.seconds)

        def keep(index: int, reply: Reply) -> None:
            i = new[index]
            found[i] = self._keep((purpose, task, machine), keys[i], questions[i], self._clean(reply))

        if requests:
            self.log.require_space(len(requests))
            try:
                self.model.ask(requests, keep, deadline)
            finally:
                self.budget.seconds += time.perf_counter() - start
        exchanges = [exchange for exchange in found if exchange is not None]
        self._judge([exchange for i, exchange in enumerate(found) if exchange is not None and i in new])
        return exchanges

    def count_answered(self, task: str, machine: str) -> None:
        """Count the questions of earlier runs as asked: the same question gets a new answer from here on."""
        kept = self.log.exchanges(purpose=self.purpose, task=task, machine=machine, model=self.model.name)
        for exchange in kept:
            if exchange.reply.outcome is Outcome.ANSWERED:
                digest, _, number = exchange.key.rpartition("-")
                self._asked[digest] = max(self._asked[digest], int(number) + 1)

    def prompt_tokens(self) -> int:
        """The most tokens of a prompt: of a window all but an answer, where that leaves a beginning's share."""
        settings, window = self.settings, self.model.window
        if window is None:
            return settings.prompt_tokens
        return min(settings.prompt_tokens, max(int(WINDOW_SHARE * window), window - settings.answer_tokens))

    def summary(self) -> str:
        """Questions asked and budget spent, in one line."""
        asked = sum(self.outcomes.values())
        parts = [f"{counted(asked, 'question')} to {self.model.name}", counted(self.budget.tokens, "token")]
        if self.budget.priced:
            parts.append(f"cost {self.budget.money:.4g}")
        if self.reused:
            parts.append(f"{counted(self.reused, 'answer')} stored before")
        failed = {name: count for name, count in self.outcomes.items() if name != Outcome.ANSWERED}
        parts += [f"{count} {name}" for name, count in sorted(failed.items())]
        notes = [self.model.note, f"ended: {self.ended}" if self.ended else ""]
        return "; ".join([", ".join(parts), *filter(None, notes)])

    def close(self) -> None:
        self.model.close()
        self.log.close()

    def _affordable(self, indices: list[int], questions: Sequence[Question]) -> list[int]:
        """The questions that the budget pays for together, each at its highest cost."""
        chosen: list[int] = []
        prompts, answers = 0, 0
        for i in indices:
            prompts += self._count(questions[i].messages)
            answers += self.settings.answer_tokens
            reason = self.budget.refusal(prompts, answers)
            if reason and not self.outcomes and not chosen:
                raise UserError(self._too_dear(reason, prompts))
            if reason:
                self.ended = "" if chosen else reason  # what is asked may cost less than it could
                break
            chosen.append(i)
        return chosen

    def _too_dear(self, reason: str, prompt_tokens: int) -> str:
        answer_tokens = self.settings.answer_tokens
        cost = f", which cost {self.budget.cost(prompt_tokens, answer_tokens):.4g}" if self.budget.priced else ""
        what = "one question" if prompt_tokens else "an answer alone"
        return (
            f"{reason}; {what} may take {prompt_tokens + answer_tokens} tokens{cost}: raise the budget, or lower"
            " --answer-tokens or --prompt-tokens"
        )

    def _keep(self, about: tuple[str, str, str], key: str, question: Question, reply: Reply) -> Exchange:
        spent, answered = (0, 0), reply.outcome is Outcome.ANSWERED
        if answered or reply.outcome is Outcome.TIMED_OUT or reply.billed:  # the latter may be paid for all the same
            most = self.model.count_tokens(reply.text) if answered else self.settings.answer_tokens
            spent = (reply.prompt_tokens or self._count(question.messages), reply.answer_tokens or most)
        self.budget.spend(*spent)
        self.outcomes[reply.outcome] += 1
        if answered:
            self.fastest_s = min(reply.seconds, self.fastest_s or reply.seconds)
        exchange = Exchange(
            key=key,
            purpose=about[0],
            task=about[1],
            machine=about[2],
            model=self.model.name,
            address=self.model.where,
            messages=question.messages,
            reply=reply,
            parent=question.parent,
            turn=question.turn,
            settings=self._sampling(),
            cost=self.budget.cost(*spent) if self.budget.priced else None,
        )
        self.log.append(exchange)
        return exchange

    def _judge(self, asked: Sequence[Exchange]) -> None:
        """UserError where no question was ever answered and none will be."""
        failures = [exchange.reply for exchange in asked if exchange.reply.outcome is not Outcome.ANSWERED]
        if failures:
            self.failure = failures[-1].reason
        never = not self.outcomes[Outcome.ANSWERED] and not self.reused
        if never and failures and all(reply.permanent for reply in failures):
            raise UserError(failures[0].reason)

    def _sampling(self) -> dict[str, float]:
        return {"temperature": self.settings.temperature, "answer_tokens": self.settings.answer_tokens}

    def _key(self, question: Question, purpose: str) -> str:
        """Hash of the question and of how often it was asked before: each asking has an answer of its own."""
        messages = [asdict(message) for message in question.messages]
        asked = [self.model.name, self.model.where, purpose, self._sampling(), messages]
        digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:24]
        number = self._asked[digest]
        self._asked[digest] += 1
        return f"{digest}-{number}"

    def _count(self, messages: Messages) -> int:
        return sum(self.model.count_tokens(message.text) for message in messages)

    def _clean(self, reply: Reply) -> Reply:
        """The reply without the endpoint's key and without invisible characters, of bounded length."""

        def clean(text: str) -> str:
            return self.model.without_secrets(plain(text.encode(errors="replace").decode()))

        text = clean(reply.text)
        cut = len(text) > MAX_ANSWER_CHARS
        return replace(
            reply,
            text=text[:MAX_ANSWER_CHARS],
            finish="length" if cut else clean(reply.finish)[:40],
            reason=clean(reply.reason),
        )
