"""The README and the pages of docs/: short enough, every link leads somewhere, every command and option exists."""

import re
from pathlib import Path

import pytest

from cuda_l2.commands._app import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONS = {"--help", "--version"}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as a forge writes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def blocks(page: Path) -> list[str]:
    """Its indented blocks."""
    return [
        re.sub(r"^    ", "", found, flags=re.M) for found in re.findall(r"(?:^    .*\n|^\n)+", page.read_text(), re.M)
    ]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for line in re.findall(r"^(?:.*/)?cuda-l2 (.+)$", "".join(blocks(page)), re.M):
        words = line.split(" # ")[0].split()
        if words[0] in OPTIONS:
            continue
        command, *words = app[words[0]], *words[1:]
        if command.default_command is None:  # a group of commands
            command, *words = command[words[0]], *words[1:]
        known = OPTIONS.union(*(argument.names for argument in command.assemble_argument_collection()))
        said = {word.partition("=")[0] for word in words if re.match(r"--\w", word)}
        assert said <= known, f"{line}: {said - known}"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "use.md"], ids=name)
def test_lines_of_python_can_be_pasted(page: Path) -> None:
    found = [block for block in blocks(page) if re.search(r"^(import|class|[\w.]+ = |result\.)", block, re.M)]
    assert found
    for block in found:
        if "#include" not in block:
            compile(block, name(page), "exec")


def test_the_picture_is_light_and_needs_nothing_from_elsewhere() -> None:
    text = (ROOT / "docs" / "demo.svg").read_text()
    assert len(text) < 60_000 and 'url("http' not in text and "@font-face" not in text
