"""The interface of language models, and how a user names one.

A kind of model is one module in kinds/ with a MODEL, chosen by the word before the colon: openai:NAME@URL, hf:PATH.
"""

import enum
import functools
import math
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cuda_l2.llm import kinds
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported
from cuda_l2.system.text import plain

AGENT = "mcp:"
"""How the proposer of what a coding agent submitted begins."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; role is system, user or assistant."""

    role: str
    text: str


Messages = tuple[Message, ...]


def without_system(messages: Messages) -> Messages:
    """The conversation for a model that knows no system prompt: it goes before the first question."""
    system = [message.text for message in messages if message.role == "system"]
    first, *others = [message for message in messages if message.role != "system"]
    return (Message(first.role, "\n\n".join([*system, first.text])), *others)


class Outcome(enum.StrEnum):
    """The outcome of one question."""

    ANSWERED = "answered"
    REFUSED = "refused"  # the same again: a wrong key, model or request
    UNREACHABLE = "unreachable"  # no server there
    DECLINED = "declined"  # by the model, or a filter over it; another question may be answered
    TOO_LONG = "too-long"  # for the model's window, which is known from then on
    RATE_LIMITED = "rate-limited"
    TIMED_OUT = "timed-out"
    FAILED = "failed"  # the server's or the model's own fault


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's answer to one question, or why there is none."""

    outcome: Outcome
    text: str = ""
    finish: str = ""  # why the model stopped: stop, length, or a server's own word
    prompt_tokens: int = 0
    answer_tokens: int = 0
    reason: str = ""  # one line that says what to do; empty when answered
    seconds: float = 0.0
    retries: int = 0
    billed: bool = False  # no answer that can be used, but a server that began one may bill it

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.ANSWERED) == bool(self.reason):
            raise ValueError("a reply has a reason exactly when it is not an answer")

    @property
    def permanent(self) -> bool:
        """Whether the next question would fail alike."""
        return self.outcome in (Outcome.REFUSED, Outcome.UNREACHABLE)


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a model."""

    messages: Messages
    answer_tokens: int
    temperature: float = 1.0
    seed: int = 0  # of models that run here


def estimated_tokens(text: str) -> int:
    """Approximate number of a text's tokens, rather too large than too small."""
    return len(text) // 3 + 1


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured speed of a model on this machine."""

    read_tokens_s: float
    """Prompt tokens a second, of all prompts of a batch together."""
    written_tokens_s: float
    """Answer tokens a second, of one answer."""


class Model(ABC):
    """A language model."""

    name: str
    """The candidates' `proposer`, as in openai:NAME."""
    where: str
    """Address or path."""
    window: int | None = None
    """Tokens of prompt and answer together, where that is known."""
    note: str = ""
    """One line on how questions are changed for this model; empty where they are asked as they are."""
    secrets: tuple[str, ...] = ()
    """Keys, which must not be written anywhere."""

    def count_tokens(self, text: str) -> int:
        """Approximate number of a text's tokens, rather too large than too small."""
        return estimated_tokens(text)

    def without_secrets(self, text: str) -> str:
        """The text without keys, should an endpoint send one back. Before any cut: half a key would stay."""
        for secret in self.secrets:
            # short ones are words that a source may hold in longer ones
            pattern = re.escape(secret) if len(secret) >= 8 else rf"(?<!\w){re.escape(secret)}(?!\w)"
            text = re.sub(pattern, "[key]", text)
        return text

    def pace(self) -> Pace | None:
        """The model's speed, measured with a few tokens; None where only answers show it."""
        return None

    @abstractmethod
    def ask(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None], deadline: float = math.inf
    ) -> None:
        """Ask all, several at once; on_reply is called in this thread with each request's index, as replies come.

        deadline: on time.perf_counter(); a question without a reply by then is timed out.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what the model holds."""


@functools.cache
def model_kinds() -> tuple[str, ...]:
    return tuple(sorted(info.name for info in pkgutil.iter_modules(kinds.__path__)))


def is_model(policy: str) -> bool:
    """Whether a policy is a language model by its name."""
    kind, colon, _ = policy.partition(":")
    return bool(colon) and kind in model_kinds()


def is_unread(proposer: str) -> bool:
    """Whether a language model or a coding agent wrote a candidate, by its proposer: code that nobody has read."""
    return is_model(proposer) or proposer.startswith(AGENT)


def open_model(policy: str, settings: ModelSettings) -> Model:
    """The model of this name; UserError where there is none or what it needs is not installed."""
    kind, _, rest = policy.partition(":")
    if not rest:
        raise UserError(f"the policy {policy!r} names no model; write openai:MODEL@URL or hf:PATH_OR_ID")
    module = imported(f"{kinds.__name__}.{kind}", f"the policy {kind} needs", "llm")
    model: Model = module.MODEL(rest, settings)
    return model


def one_line(text: str, limit: int = 300) -> str:
    """A text of others as one line of bounded length."""
    line = " ".join(plain(" ".join(text.split())).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
