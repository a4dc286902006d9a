"""docs/architecture.md against the code: what each room imports is what its row says."""

import ast
import re
from pathlib import Path

import pytest

import cuda_l2

PACKAGE = Path(cuda_l2.__file__).parent
TABLE = (PACKAGE.parent / "docs" / "architecture.md").read_text()
ROWS = {
    name: imports
    for names, imports in re.findall(r"^\| (`.+?) \| .* \| (.+) \|$", TABLE, re.MULTILINE)
    for name in re.findall(r"`([\w.]+)/?`", names)
}
"""What it may import, by room or file, in the table's order."""
GROUND = {name.removesuffix(".py") for name, imports in ROWS.items() if imports == "standard library"} - {"retrieve"}
"""What everything may import."""


def allowed(room: str) -> set[str]:
    if re.fullmatch(r"(every|any)thing above", ROWS[room]):
        above = list(ROWS)[: list(ROWS).index(room)]
        return {name.removesuffix(".py") for name in above} | GROUND
    return set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", ROWS[room]))) | GROUND


def imported(path: Path) -> set[str]:
    """The parts of the package that a file names in imports, wherever in it they stand."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cuda_l2":
            _, *parts = node.module.split(".")
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
    return {name for name in found if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()}


def test_every_room_and_file_has_a_row() -> None:
    there = {
        path.name for path in PACKAGE.iterdir() if (path.is_dir() and list(path.glob("*.py"))) or path.suffix == ".py"
    }
    assert there - set(ROWS) == {"__init__.py", "cli.py"}
    assert {name for name in ROWS if not (PACKAGE / name).exists()} == set()


@pytest.mark.parametrize("room", [name for name in ROWS if "." not in name])
def test_a_room_imports_what_its_row_says(room: str) -> None:
    for path in sorted((PACKAGE / room).rglob("*.py")):
        beyond = imported(path) - allowed(room) - {room}
        assert not beyond, f"{path.relative_to(PACKAGE)} imports {', '.join(sorted(beyond))}"


def test_stages_do_not_import_one_another() -> None:
    stages = {"propose", "build", "verify", "measure"}
    for stage in stages:
        for path in (PACKAGE / stage).rglob("*.py"):
            assert not imported(path) & (stages - {stage}), path
