"""Instructions: a language model's for a snippet, the snippet's own comment and signature, or a task's description."""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.corpus.asking import Template, answers
from cuda_l2.corpus.snippets import Snippet
from cuda_l2.llm._base import one_line
from cuda_l2.llm.client import Client
from cuda_l2.llm.thoughts import without_thoughts
from cuda_l2.machine._base import Target
from cuda_l2.records import Task
from cuda_l2.system.text import fenced
from cuda_l2.tasks import describe

TEMPLATE = "instruct.md"
PURPOSE = "instruct"
LEAST_CHARS, MOST_CHARS, MOST_SAID = 20, 1000, 400
SKIP = "SKIP"
_NOUNS = {"kernel": "CUDA kernel", "template": "template", "function": "function", "type": "type", "macro": "macro"}


@dataclass(frozen=True, slots=True)
class Instruction:
    """The request to a programmer, and its origin: model, comment, signature or task."""

    text: str
    by: str


def from_code(snippet: Snippet) -> Instruction:
    """An instruction from the comment before the definition, if it has words, and the signature."""
    noun = _NOUNS[snippet.kind]
    if snippet.kind == "template":
        noun = "function template" if "(" in snippet.signature.partition(">")[2] else "class template"
    named = f"the {noun} `{snippet.name}`" if snippet.name else f"a {noun}"
    signature = "" if snippet.kind == "macro" else f" Its declaration: `{snippet.signature}`."
    said = _first_sentences(snippet.comment)
    text = f"Write {named}{': ' + said if said else '.'}{signature}"
    return Instruction(text, "comment" if said else "signature")


def for_task(task: Task, target: Target) -> Instruction:
    """The instruction for a kernel under the launch contract: form, machine, task."""
    return Instruction(f"Write a kernel for {target.machine} under the launch contract. {describe(task)}", "task")


def by_model(
    client: Client,
    asked: Sequence[tuple[str, Snippet]],
    on_answer: Callable[[int], None] = lambda done: None,
    prompts: Path | None = None,
) -> dict[int, Instruction | None]:
    """A model's instructions for snippets by index; None where the model finds a snippet useless.

    asked: each snippet with its file's name. Snippets without a usable answer are left out. prompts: folder of the
    user's templates. UserError where the model never answers.
    """
    template, texts = Template(TEMPLATE, prompts), []
    for name, snippet in asked:
        code = fenced(snippet.code, "cuda", len(snippet.code))
        texts.append(template.filled({"source": name, "kind": snippet.kind, "code": code}))
    found: dict[int, Instruction | None] = {}
    for i, exchange in answers(client, PURPOSE, texts, on_answer):
        said = _read(exchange.reply.text)
        if said is not None:
            found[i] = said if said.text else None
    return found


def _read(answer: str) -> Instruction | None:
    """The instruction of an answer, with empty text where the model rejects the snippet; None where there is none."""
    text = without_thoughts(answer).strip().strip("`").strip()
    if re.match(rf"\W*{SKIP}\b", text):
        return Instruction("", "model")
    text = re.sub(r"^\W*instruction\W*:\s*", "", text, flags=re.IGNORECASE)
    text = one_line(text, MOST_CHARS).strip('" ')
    return Instruction(text, "model") if len(text) >= LEAST_CHARS else None


def _first_sentences(comment: str) -> str:
    """The whole sentences that fit; empty where the comment has fewer than three words."""
    if len(re.findall(r"[A-Za-z]{2,}", comment)) < 3:
        return ""
    if len(comment) <= MOST_SAID:
        return comment if comment[-1] in ".!?" else f"{comment}."
    cut = comment[:MOST_SAID]
    end = max(cut.rfind(". "), cut.rfind("; "))
    return cut[: end + 1] if end > MOST_SAID // 4 else f"{cut.rpartition(' ')[0]} ..."


def fingerprint(text: str) -> str:
    """16 hex digits of a text's content, as candidates' ids."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
