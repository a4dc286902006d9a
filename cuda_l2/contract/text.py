"""docs/contract.md, and docs/tasks.md for other tasks than matrix products, in the words that a model is given."""

import re
from pathlib import Path

from cuda_l2.records import Task

HEADINGS = {"cpu": "CPU candidates", "cuda": "CUDA candidates"}
_TASKS = "The launch contract for tasks"
_SAID = "What the text may say"
_PRODUCTS_ALONE = ("The function", "An example", "A small one, complete")
_FOR_PEOPLE = ("Examples",)
_INSTALLED = Path(__file__).parent
_IN_REPOSITORY = Path(__file__).parents[2] / "docs"


def contract_text(target: str, task: Task) -> str:
    """The chapter on one target's candidates, without its heading and the section of examples in the repository.

    For tasks other than matrix products docs/tasks.md replaces what is said of the function and the example.
    """
    sections = _sections("contract.md", HEADINGS[target])
    left_out: tuple[str, ...] = _FOR_PEOPLE
    if not task.product:
        left_out += _PRODUCTS_ALONE
        added = _sections("tasks.md", _TASKS)
        kept = ("Buffers", f"{HEADINGS[target]} for tasks")
        at = list(sections).index(_SAID)
        pairs = [*sections.items()]
        sections = dict([*pairs[:at], *((name, added[name]) for name in kept), *pairs[at:]])
    return "\n\n".join(text.strip() for name, text in sections.items() if name not in left_out)


def document(file: str) -> Path:
    """Where contract.md or tasks.md lies: in a checkout's docs, or beside this file where the package is installed."""
    return _INSTALLED / file if (_INSTALLED / file).exists() else _IN_REPOSITORY / file


def _sections(file: str, chapter: str) -> dict[str, str]:
    """The sections of a chapter by their headings, which they begin with; what comes before the first one is ''."""
    chapters = re.split(r"^## (.+)\n", document(file).read_text(), flags=re.MULTILINE)
    text = chapters[chapters.index(chapter) + 1]
    parts = re.split(r"^(?=### )", text, flags=re.MULTILINE)
    return {part.partition("\n")[0].removeprefix("### ") if i else "": part for i, part in enumerate(parts)}
