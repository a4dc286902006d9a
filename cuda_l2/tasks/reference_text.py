"""A task's reference as PyTorch source that stands alone: what a model is shown is what the judge runs."""

import ast
import copy
import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any

from cuda_l2.tasks._base import definition

NAME = "reference"


@cache
def reference_text(task: str) -> str:
    """A module with one function `reference` of the tensors, and of sizes, by name. task: its name.

    Helpers and constants that it uses stand before it, annotations are left out. UserError where there is no such task.
    """
    imports: dict[str, None] = {}
    others: dict[str, str] = {}
    main = _text(definition(task).reference, NAME, imports, others)
    functions = [text for text in others.values() if text.startswith("def ")]
    constants = [text for text in others.values() if not text.startswith("def ")]
    head = ["\n".join(lines) for lines in (sorted(imports), constants) if lines]
    return "\n\n".join([*head, *functions, main]) + "\n"


def _text(function: Callable[..., Any], name: str, imports: dict[str, None], others: dict[str, str]) -> str:
    """A function's text under a name. What it uses goes into `imports` and, by its name, into `others`."""
    node = _Bare().visit(copy.deepcopy(_node(function)))
    found = inspect.getclosurevars(function).nonlocals
    for used in sorted({part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - _bound(node)):
        value = found.get(used, function.__globals__.get(used))
        if isinstance(value, types.ModuleType):
            alias = "" if used == value.__name__ else f" as {used}"
            imports[f"import {value.__name__}{alias}"] = None
        elif isinstance(value, types.FunctionType) and used not in others:
            others[used] = ""  # one that uses itself ends here
            others[used] = _text(value, used, imports, others)
        elif isinstance(value, int | float | str):
            others[used] = f"{used} = {value!r}"
    body = [ast.Return(node.body)] if isinstance(node, ast.Lambda) else node.body
    (made,) = ast.parse("def function(): ...").body
    assert isinstance(made, ast.FunctionDef)
    made.name, made.args, made.body = name, node.args, body
    return ast.unparse(ast.fix_missing_locations(made))


def _node(function: Callable[..., Any]) -> ast.Lambda | ast.FunctionDef:
    """Where a function stands in its file; the inner one of two on the same line does not count."""
    code = function.__code__
    for node in ast.walk(_module(code.co_filename)):
        if isinstance(node, ast.Lambda | ast.FunctionDef) and node.lineno == code.co_firstlineno:
            names = [argument.arg for argument in node.args.args]
            if names == list(code.co_varnames[: code.co_argcount]):
                return node
    raise ValueError(f"{function} is not in {code.co_filename}")


@cache
def _module(path: str) -> ast.Module:
    with open(path) as file:  # noqa: PTH123 - code objects know their file as text
        return ast.parse(file.read())


def _bound(node: ast.AST) -> set[str]:
    """Names that a function gives values to itself."""
    stored = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return stored | {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}


class _Bare(ast.NodeTransformer):
    """Takes annotations off."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None
        return ast.copy_location(ast.Assign([node.target], node.value), node)
