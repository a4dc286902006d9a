"""An instruction for every snippet: a language model's, or from the code's own comment and signature; or for a task."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.corpus.snippets import Snippet
from cuda_l2.errors import UserError
from cuda_l2.llm._base import Message, Outcome, one_line, without_thoughts
from cuda_l2.llm.client import Client, Question
from cuda_l2.propose._prompt import fenced
from cuda_l2.propose._task import describe_task
from cuda_l2.records import Task
from cuda_l2.targets._base import Target

TEMPLATE = "instruct.md"
PACKAGED = Path(__file__).with_name(TEMPLATE)
LEAST_CHARS, MOST_CHARS = 20, 1000
SKIP = "SKIP"
_NOUNS = {"kernel": "CUDA kernel", "template": "template", "function": "function", "type": "type", "macro": "macro"}


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a programmer would be asked, and who worded it: model, comment, signature or task."""

    text: str
    by: str


def from_code(snippet: Snippet) -> Instruction:
    """From the comment before the definition where it says something, and the signature."""
    noun = _NOUNS[snippet.kind]
    if snippet.kind == "template":
        noun = "function template" if "(" in snippet.signature.partition(">")[2] else "class template"
    named = f"the {noun} `{snippet.name}`" if snippet.name else f"a {noun}"
    signature = "" if snippet.kind == "macro" else f" Its declaration: `{snippet.signature}`."
    said = _first_sentences(snippet.comment)
    text = f"Write {named}{': ' + said if said else '.'}{signature}"
    return Instruction(text, "comment" if said else "signature")


def for_task(task: Task, target: Target) -> Instruction:
    """For a kernel under the launch contract: the form, the machine, the task."""
    return Instruction(f"Write a kernel for {target.machine} under the launch contract. {describe_task(task)}", "task")


def by_model(
    client: Client,
    asked: Sequence[tuple[str, Snippet]],
    on_answer: Callable[[int], None] = lambda done: None,
    template: Path | None = None,
) -> dict[int, Instruction | None]:
    """A model's instruction for snippets, each with its file's name, by index; None where the model says it is no use.

    What it did not answer, or not in words, is left out; so is all after the budget's end. What was answered in an
    earlier run is not asked again. UserError where the model never answers anything.
    """
    text = _template(template)
    found: dict[int, Instruction | None] = {}
    size = client.settings.concurrency
    for start in range(0, len(asked), size):
        group = asked[start : start + size]
        questions = [Question((Message("user", _filled(text, name, snippet)),)) for name, snippet in group]
        for exchange in client.ask("corpus", "", questions):  # fewer where the budget ends
            said = _read(exchange.reply.text) if exchange.reply.outcome is Outcome.ANSWERED else None
            if said is not None:
                where = next(i for i, question in enumerate(questions) if question.messages == exchange.messages)
                found[start + where] = said if said.text else None
        on_answer(min(start + size, len(asked)))
        if client.ended:
            break
    return found


def _read(answer: str) -> Instruction | None:
    """The instruction of an answer, without text where the model would leave the snippet out; None where none is."""
    text = without_thoughts(answer).strip().strip("`").strip()
    if re.match(rf"\W*{SKIP}\b", text):
        return Instruction("", "model")
    text = re.sub(r"^\W*instruction\W*:\s*", "", text, flags=re.IGNORECASE)
    text = one_line(text, MOST_CHARS).strip('" ')
    return Instruction(text, "model") if len(text) >= LEAST_CHARS else None


def _first_sentences(comment: str, limit: int = 400) -> str:
    """As many whole sentences as fit; empty where the comment has no words to speak of."""
    if len(re.findall(r"[A-Za-z]{2,}", comment)) < 3:
        return ""
    if len(comment) <= limit:
        return comment if comment[-1] in ".!?" else f"{comment}."
    cut = comment[:limit]
    end = max(cut.rfind(". "), cut.rfind("; "))
    return cut[: end + 1] if end > limit // 4 else f"{cut.rpartition(' ')[0]} ..."


def _template(path: Path | None) -> str:
    chosen = path if path is not None and path.exists() else PACKAGED
    try:
        text = chosen.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the template {chosen}: {error}") from None
    if "{code}" not in text:
        raise UserError(f"{chosen} has no place {{code}}")
    return text


def _filled(template: str, name: str, snippet: Snippet) -> str:
    places = {"{source}": name, "{kind}": snippet.kind, "{code}": fenced(snippet.code, "cuda", len(snippet.code))}
    return re.sub("|".join(map(re.escape, places)), lambda match: places[match.group()], template)


def fingerprint(text: str) -> str:
    """16 hex digits of a text's content, as candidates' ids."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
