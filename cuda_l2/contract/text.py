"""docs/contract.md, and docs/tasks.md for other tasks than matrix products, in the words that a model is given."""

import re
from pathlib import Path

from cuda_l2.records import Task

HEADINGS = {"cpu": "CPU candidates", "cuda": "CUDA candidates"}
_TASKS = "The launch contract for tasks"
_SAID = ("What the text may say", "What is refused most often")
_SHARED = ("What is checked", "An example", "A small one, complete")
"""Sections of the long chapter that the one in short has too."""
_PRODUCTS_ALONE = ("The function", *_SHARED)
_FOR_PEOPLE = ("Examples",)
_INSTALLED = Path(__file__).parent
_IN_REPOSITORY = Path(__file__).parents[2] / "docs"


def contract_text(target: str, task: Task, *, full: bool = False) -> str:
    """The chapter on one target's candidates, without its heading and the section of examples in the repository.

    full: the long chapter instead of the one in short, which has the long one's example and checks. For tasks other
    than matrix products docs/tasks.md replaces what is said of the function and the example, `describe` the checks.
    """
    sections = _sections("contract.md", HEADINGS[target])
    if not full:
        shared = {name: text for name, text in sections.items() if name in _SHARED}
        sections = _inserted(_sections("contract.md", f"{HEADINGS[target]} in short"), shared)
    left_out: tuple[str, ...] = _FOR_PEOPLE
    if not task.product:
        left_out += _PRODUCTS_ALONE
        added = _sections("tasks.md", _TASKS)
        sections = _inserted(sections, {name: added[name] for name in ("Buffers", f"{HEADINGS[target]} for tasks")})
    return "\n\n".join(text.strip() for name, text in sections.items() if name not in left_out)


def _inserted(sections: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    """The sections with others before the one on what a text may say."""
    pairs = [*sections.items()]
    at = next(i for i, name in enumerate(sections) if name in _SAID)
    return dict([*pairs[:at], *others.items(), *pairs[at:]])


def document(file: str) -> Path:
    """Where contract.md or tasks.md lies: in a checkout's docs, or beside this file where the package is installed."""
    return _INSTALLED / file if (_INSTALLED / file).exists() else _IN_REPOSITORY / file


def _sections(file: str, chapter: str) -> dict[str, str]:
    """The sections of a chapter by their headings, which they begin with; what comes before the first one is ''."""
    chapters = re.split(r"^## (.+)\n", document(file).read_text(), flags=re.MULTILINE)
    text = chapters[chapters.index(chapter) + 1]
    parts = re.split(r"^(?=### )", text, flags=re.MULTILINE)
    return {part.partition("\n")[0].removeprefix("### ") if i else "": part for i, part in enumerate(parts)}
