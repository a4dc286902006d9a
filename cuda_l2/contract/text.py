"""docs/contract.md in the words that a model is given."""

import re
from pathlib import Path

HEADINGS = {"cpu": "CPU candidates", "cuda": "CUDA candidates"}
_INSTALLED = Path(__file__).with_name("contract.md")
_IN_REPOSITORY = Path(__file__).parents[2] / "docs" / "contract.md"


def contract_text(target: str) -> str:
    """The chapter on one target's candidates, without its heading and the section of examples in the repository."""
    path = _INSTALLED if _INSTALLED.exists() else _IN_REPOSITORY
    chapters = re.split(r"^## (.+)\n", path.read_text(), flags=re.MULTILINE)
    chapter = chapters[chapters.index(HEADINGS[target]) + 1]
    sections = re.split(r"^(?=### )", chapter, flags=re.MULTILINE)
    return "".join(section for section in sections if not section.startswith("### Examples\n")).strip()
