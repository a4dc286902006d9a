"""The package's imports: no circle of files or rooms, and the table of rooms in docs/architecture.md."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import cuda_l2

PACKAGE = Path(cuda_l2.__file__).parent
TABLE = (PACKAGE.parent / "docs" / "architecture.md").read_text()
ROWS = {
    name.removesuffix(".py"): set(re.findall(r"`(\w+)`", imports))
    for names, imports in re.findall(r"^\| (`.+?) \| .* \| (.+) \|$", TABLE, re.MULTILINE)
    for name in re.findall(r"`([\w.]+)/?`", names)
}
"""The rooms that each room may import, in the table's order. A file beside the rooms is a room of its own."""
OPTIONAL = "kernelbench"
"""The room that none but itself imports."""
STAGES = {"propose", "build", "verify", "measure"}

Graph = Mapping[str, set[str]]


def module_names() -> dict[str, Path]:
    """Dotted name inside the package and path of every file; the package's own __init__ is __init__."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])] = path
    return names


MODULES = module_names()


def imported(path: Path) -> Iterator[str]:
    """The package's files that a file imports, also inside functions and for type checkers alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            files = [name for name in named if name.removeprefix("cuda_l2.") in MODULES]
            modules = [*files, node.module or ""] if len(files) < len(named) else files
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            top, _, rest = module.partition(".")
            if top == "cuda_l2":
                yield rest or "__init__"


@cache
def imports() -> Graph:
    """What each of the package's files imports: read once, and not by every worker that collects tests."""
    return {name: set(imported(path)) - {name} for name, path in MODULES.items()}


def room(module: str) -> str:
    return module.partition(".")[0]


def rooms(files: Graph) -> dict[str, set[str]]:
    """The graph of rooms that a graph of files makes."""
    graph: dict[str, set[str]] = {room(name): set() for name in files}
    for name, others in files.items():
        graph[room(name)] |= {room(other) for other in others} - {room(name)}
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """The strongly connected parts of more than one node."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, unread = set(), [start]
        while unread:
            for other in graph[unread.pop()] - found:
                found.add(other)
                unread.append(other)
        reached[start] = found
    parts = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph if a in reached[a]}
    return sorted([*part] for part in parts)


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []


def test_imports_are_read_inside_functions_and_of_names(tmp_path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "import cuda_l2\nfrom cuda_l2 import contract\nfrom cuda_l2.records import Gemm\n"
        "def f():\n    from cuda_l2.system import errors, paths\n"
    )
    assert set(imported(file)) == {"__init__", "contract", "records", "system.errors", "system.paths"}


def test_files_form_no_circle() -> None:
    assert circles(imports()) == []


def test_rooms_form_no_circle() -> None:
    assert circles(rooms(imports())) == []


def test_nothing_imports_the_optional_room() -> None:
    importers = {(name, other) for name, others in imports().items() for other in others if room(other) == OPTIONAL}
    assert {(name, other) for name, other in importers if room(name) != OPTIONAL} == set()


def test_every_room_has_a_row() -> None:
    assert set(ROWS) == {room(name) for name in MODULES}


@pytest.mark.parametrize("name", ROWS)
def test_a_room_imports_what_its_row_says(name: str) -> None:
    order = [*ROWS]
    assert ROWS[name] <= set(order[: order.index(name)]), "a row names rooms of the rows above it alone"
    for file, others in imports().items():
        if room(file) == name:
            beyond = {other for other in others if room(other) not in ROWS[name] | {name, "system"}}
            assert not beyond, f"{file} imports {', '.join(sorted(beyond))}"


def test_stages_do_not_import_one_another() -> None:
    for name, others in imports().items():
        if room(name) in STAGES:
            assert not {room(other) for other in others} & (STAGES - {room(name)}), name


def test_importing_the_package_and_its_help_stays_light() -> None:
    light = (("cuda_l2", ("torch", "numpy")), ("cuda_l2.commands._app", ("torch",)), ("cuda_l2.runs.parts", ("torch",)))
    for module, heavy in light:
        code = f"import sys, {module}; assert not set({heavy}) & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)
