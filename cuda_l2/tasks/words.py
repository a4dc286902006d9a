"""What the author of a kernel must know of a task: its tensors, the values in them, how exact results must be.

And its reference as PyTorch source that stands alone: what a model is shown is what the judge runs.
"""

import ast
import copy
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from cuda_l2.contract.expressions import evaluate
from cuda_l2.records import SHORT_DTYPES, Accumulate, Gemm, Layout, Operation, Tensor
from cuda_l2.tasks._base import definition
from cuda_l2.tasks.tolerance import Bounds, bounds
from cuda_l2.tasks.values import Domain, Values

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


SMALL_BYTES, SMALL_FLOPS = 4 << 20, 1 << 30
"""Up to this the tolerance is computed at the task's own sizes, else at those for a CPU."""
_DOMAINS = {
    Domain.REAL: "real numbers",
    Domain.POSITIVE: "numbers above 0",
    Domain.SQUARES: "numbers from 0 up",
    Domain.UNIT: "numbers from 0 up to 1",
    Domain.PROBABILITIES: "probabilities along the last dimension",
    Domain.LOG_PROBABILITIES: "logarithms of probabilities along the last dimension",
    Domain.DEFINITE: "symmetric positive definite matrices",
    Domain.TRIANGULAR: "lower triangular matrices that can be inverted",
    Domain.BOOLEANS: "booleans",
}


def product_words(gemm: Gemm) -> str:
    """The instruction for a matrix product."""
    tn, fp32 = gemm.layout is Layout.TN, gemm.accumulate is Accumulate.FP32
    b = "N x K row-major, that is column-major B (layout tn)" if tn else "K x N row-major (layout nn)"
    sums = "fp32; sums in less precision fail" if fp32 else "fp16 or better"
    return (
        f"C = A B with M = {gemm.m}, N = {gemm.n}, K = {gemm.k}. A is M x K row-major, B is {b}, C is M x N row-major;"
        f" all {SHORT_DTYPES[gemm.dtype]}. Products are summed in {sums}. {gemm.flops:,} floating-point operations,"
        f" {gemm.bytes:,} bytes that must move. The kernel is timed for this shape alone and need serve no other."
    )


def tensor_lines(task: Operation) -> list[str]:
    """Each tensor's name, part, type, shape and values, a line each."""
    known = definition(task.name)
    lines = []
    for tensor in task.inputs:
        lines.append(f"- input {shown(tensor)}, {_values(known.inputs[tensor.name], task)}")
    for tensor in task.weights:
        values = _values(known.weights[tensor.name], task)
        lines.append(f"- weight {shown(tensor)}, {values}, the same from call to call")
    return lines + [f"- output {shown(tensor)}" for tensor in task.outputs]


@cache
def tolerance_words(task: Operation) -> str:
    """How far each output may be off, in figures for usual values."""
    known = definition(task.name)
    small = task.bytes <= SMALL_BYTES and task.flops <= SMALL_FLOPS
    shown = task if small else known.task(known.cpu, task.dtype)
    found = bounds(known.bind(dict(shown.sizes)), known.draw(shown, 0))
    at = "at these sizes" if small else f"at {sizes_words(dict(shown.sizes))}"
    return f"on normal numbers {at}: {limits_words(task.outputs, found)}"


def limits_words(outputs: Sequence[Tensor], limits: Sequence[Bounds]) -> str:
    """What outputs may be off by."""
    said = []
    for tensor, limit in zip(outputs, limits, strict=True):
        if limit.dtype.is_floating_point:
            said.append(f"`{tensor.name}` RMS error {limit.rms_allowed:.1e}, largest error {limit.max_allowed:.1e}")
        else:
            said.append(f"`{tensor.name}` equal, but where rounding decides")
    return "; ".join(said)


def sizes_words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sizes.items())


def shown(tensor: Tensor) -> str:
    """A tensor's name, type and shape."""
    return f"`{tensor.name}`: {tensor.dtype} [{', '.join(map(str, tensor.shape))}]"


def _values(values: Values, task: Operation) -> str:
    if values.domain is Domain.INTEGERS:
        most = max(values.least + 1, evaluate(values.below, dict(task.sizes))) - 1
        return f"whole numbers from {values.least} to {most}"
    return _DOMAINS[values.domain]
