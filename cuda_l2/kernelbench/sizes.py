"""The whole numbers that a file in KernelBench's format is written with: which it makes of others, and other ones."""

import ast
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

import torch

SMALL = 3
"""To which sizes may be halved that no weight depends on: some modules take 1 for another kind of input."""

MOST_PARTS = 32
"""A tuple or list of more numbers holds data."""

SEQUENCES = (tuple, list, torch.Size)

SIZED = "_sized_by_cuda_l2"


class Assignments:
    """Assignments of a file to its global names, outside functions and classes."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._last: dict[str, int] = {}  # of the statements
        self._values: dict[str, list[ast.expr]] = {}
        for index, (_, statement) in enumerate(_statements(ast.parse(text).body)):
            if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and statement.value:
                for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                    for name, value in _assigned(target, statement.value):
                        self._values.setdefault(name, []).append(value)
                        self._last[name] = index

    def with_sources(self, names: Iterable[str]) -> list[str]:
        """These names, and those that they are made of."""
        found = list(dict.fromkeys(names))
        for name in found:  # it grows meanwhile
            for value in self._values.get(name, ()):
                found += [source for source in sorted(_reads(value)) if source not in found]
        return found

    def derived(self, now: Mapping[str, Any]) -> set[str]:
        """Names, and parts of tuples and lists as shape_0, that the file makes of others which could be halved."""
        found: set[str] = set()

        def is_made(value: ast.expr, name: str) -> bool:
            return any(source in found or _may_shrink(now.get(source)) for source in _reads(value) - {name})

        for name, values in self._values.items():
            parts = values[0].elts if len(values) == 1 and isinstance(values[0], ast.Tuple | ast.List) else []
            if parts and not any(isinstance(part, ast.Starred) for part in parts):
                found |= {f"{name}_{index}" for index, part in enumerate(parts) if is_made(part, name)}
            elif any(is_made(value, name) for value in values):
                found |= {name, *(f"{name}_{index}" for index in range(MOST_PARTS))}
        return found

    def execute(self, namespace: types.ModuleType, sizes: Mapping[str, int]) -> None:
        """The file with these sizes: each name takes its own as soon as the file has assigned it for the last time."""
        tree = ast.parse(self._text)
        statements = list(_statements(tree.body))
        names = dict.fromkeys(name if name in self._values else name.rpartition("_")[0] for name in sizes)
        for name in names:
            if name in self._last:
                body, statement = statements[self._last[name]]
                call = ast.parse(f"{name} = {SIZED}({name!r}, {name})").body[0]
                body.insert(body.index(statement) + 1, ast.copy_location(call, statement))

        def sized(name: str, value: Any) -> Any:
            if name in sizes:
                return sizes[name]
            parts = [sizes.get(f"{name}_{index}", part) for index, part in enumerate(value)]
            if isinstance(value, list):  # other names may be of the same list
                value[:] = parts
                return value
            return type(value)(parts)

        setattr(namespace, SIZED, sized)
        exec(compile(ast.fix_missing_locations(tree), str(namespace.__file__), "exec"), vars(namespace))
        delattr(namespace, SIZED)
        for name in names.keys() - self._last.keys():  # bound by a loop, say
            setattr(namespace, name, sized(name, getattr(namespace, name)))


def _statements(body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], ast.stmt]]:
    """Those outside functions and classes, each with the list that it stands in."""
    for statement in body.copy():
        yield body, statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    parts = [node.elts for node in (target, value) if isinstance(node, ast.Tuple | ast.List)]
    if (
        len(parts) == 2
        and len(parts[0]) == len(parts[1])
        and not any(isinstance(part, ast.Starred) for part in [*parts[0], *parts[1]])
    ):
        for pair in zip(*parts, strict=True):
            yield from _assigned(*pair)
        return
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, value


def _reads(value: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def _may_shrink(value: object) -> bool:
    parts = value if isinstance(value, SEQUENCES) and len(value) <= MOST_PARTS else [value]
    return any(is_size(part) and part > SMALL for part in parts)


def is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
