"""Asks a language model about a corpus: templates that a user may change, many questions, answers by index."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from cuda_l2.llm._base import Message, Outcome
from cuda_l2.llm.client import Client, Question
from cuda_l2.llm.exchanges import Exchange
from cuda_l2.propose._prompt import read_template
from cuda_l2.system.errors import UserError

CODE = "{code}"
"""The place that every template must have."""
MOST_DEAD = 6
"""Number of groups in a row, refused or without a server, after which no more is asked; outages are shorter."""


def packaged_templates() -> list[Path]:
    """The templates that come with the package."""
    return sorted(Path(__file__).parent.glob("*.md"))


class Template:
    """A text with places in braces, from the package or the user's folder. UserError where it cannot be used."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        packaged = Path(__file__).with_name(name)
        self.text = read_template(packaged, folder)
        if CODE not in self.text:
            raise UserError(f"{(folder or packaged.parent) / name} has no place {CODE}")

    def filled(self, places: Mapping[str, str]) -> str:
        """The text with its places filled in one pass, so that a filled text's own braces stay."""
        pattern = "|".join(re.escape(f"{{{name}}}") for name in places)
        return re.sub(pattern, lambda match: places[match.group()[1:-1]], self.text)


def answers(
    client: Client, purpose: str, prompts: Sequence[str], on_answer: Callable[[int], None] = lambda done: None
) -> Iterator[tuple[int, Exchange]]:
    """The answered exchanges, each with its prompt's index.

    A stored answer of an earlier run is used, also after the budget's end. After MOST_DEAD groups in a row without a
    server or with refusals, no more is asked. UserError where the model never answers anything.
    """
    size = client.settings.concurrency
    dead = 0
    for start in range(0, len(prompts), size):
        questions = [Question((Message("user", prompt),)) for prompt in prompts[start : start + size]]
        exchanges = client.ask("corpus", "", questions, purpose=purpose)  # in order; fewer where the budget ends
        place = 0
        for exchange in exchanges:
            while questions[place].messages != exchange.messages:
                place += 1
            if exchange.reply.outcome is Outcome.ANSWERED:
                yield start + place, exchange
            place += 1
        on_answer(min(start + size, len(prompts)))
        dead = dead + 1 if exchanges and all(exchange.reply.permanent for exchange in exchanges) else 0
        if dead == MOST_DEAD:
            return
