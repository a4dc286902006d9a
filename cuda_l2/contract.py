"""The launch contract of a candidate: plain data, as TOML in the source's leading comment.

For the CPU target:

    /* cuda-l2
    target = "cpu"
    entry = "gemm"
    threads = 2
    workspace = "threads * 4096 + 4 * m * n"
    */

`entry` names the one exported function, of the signature written in docs/contract.md. `threads` is
how many the runtime's parallel-for offers. `workspace` is a number of bytes: an expression over
m, n, k and threads, evaluated here and never by eval.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_EXPRESSION_LENGTH = 2000
MAX_VALUE = 1 << 62
_COMMENT = re.compile(r"\s*/\*\s*cuda-l2\b((?:[^*]|\*(?!/)){0,8000})\*/")
_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(.))")


class ContractError(ValueError):
    """The source's contract is missing or says something that cannot be."""


@dataclass(frozen=True, slots=True)
class CpuContract:
    """What the runtime must know to call a CPU candidate."""

    entry: str
    threads: int
    workspace: str

    def workspace_bytes(self, m: int, n: int, k: int) -> int:
        return evaluate(self.workspace, {"m": m, "n": n, "k": k, "threads": self.threads})


def parse(source: str) -> CpuContract:
    """Read the contract from the leading comment of a candidate's source."""
    match = _COMMENT.match(source)
    if not match:
        raise ContractError("the source does not begin with a /* cuda-l2 ... */ comment that states its contract")
    try:
        fields = tomllib.loads(match.group(1))
    except (ValueError, RecursionError) as error:  # tomllib's own error is a ValueError; long numbers raise plain ones
        raise ContractError(f"the contract is not TOML: {error}") from None
    if fields.pop("target", None) != "cpu":
        raise ContractError('the contract must say target = "cpu"')
    unknown = set(fields) - {"entry", "threads", "workspace"}
    if unknown:
        raise ContractError(f"the contract has unknown fields: {', '.join(sorted(unknown))}")
    entry, threads, workspace = fields.get("entry", "gemm"), fields.get("threads", 1), fields.get("workspace", 0)
    if not isinstance(entry, str) or not re.fullmatch(r"[A-Za-z_]\w{0,62}", entry):
        raise ContractError("entry must be the name of a C function")
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= 1024:
        raise ContractError("threads must be a whole number from 1 to 1024")
    if isinstance(workspace, bool) or not isinstance(workspace, int | str) or workspace == "":
        raise ContractError("workspace must be a number of bytes or an expression in quotes")
    contract = CpuContract(entry, threads, str(workspace))
    contract.workspace_bytes(1, 1, 1)
    return contract


def evaluate(expression: str, names: Mapping[str, int]) -> int:
    """The value of an expression of whole numbers, names, + - * / %, parentheses and min, max, cdiv.

    `/` rounds down, `cdiv(a, b)` up. Anything else, a division by zero, a negative result or one
    beyond 2^62 raises ContractError.
    """
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ContractError(f"expression of more than {MAX_EXPRESSION_LENGTH} characters")
    value = _Expression(expression, names).value()
    if value < 0:
        raise ContractError(f"{expression!r} is negative: {value}")
    return value


class _Expression:
    """Recursive descent over: sum = product {(+|-) product}; product = atom {(*|/|%) atom}."""

    functions: Mapping[str, Callable[[int, int], int]] = {
        "min": min,
        "max": max,
        "cdiv": lambda a, b: -(-a // b),
    }
    max_depth = 40

    def __init__(self, text: str, names: Mapping[str, int]) -> None:
        self.text, self.names = text, names
        self.tokens = [match.group().strip() for match in _TOKEN.finditer(text.strip())]
        self.position = 0
        self.depth = 0

    def value(self) -> int:
        try:
            value = self.sum()
        except ZeroDivisionError:
            raise ContractError(f"{self.text!r} divides by zero") from None
        if self.position != len(self.tokens):
            raise self.error()
        return value

    def error(self) -> ContractError:
        found = repr(self.peek()) if self.peek() else "the end"
        return ContractError(f"cannot read the expression {self.text!r} at {found}; names: {', '.join(self.names)}")

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.peek()
        if not token or (expected and token not in expected):
            raise self.error()
        self.position += 1
        return token

    def sum(self) -> int:
        self.depth += 1
        if self.depth > self.max_depth:
            raise ContractError("expression nested too deeply")
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        self.depth -= 1
        return value

    def product(self) -> int:
        value = self.atom()
        while self.peek() in ("*", "/", "%"):
            operator, right = self.take(), self.atom()
            value = value * right if operator == "*" else value // right if operator == "/" else value % right
            if abs(value) > MAX_VALUE:
                raise ContractError(f"{self.text!r} is beyond 2^62")
        return value

    def atom(self) -> int:
        token = self.take()
        if token == "(":
            value = self.sum()
            self.take(")")
            return value
        if token.isascii() and token.isdigit() and len(token) <= 19:
            return int(token)
        if token in self.functions and self.peek() == "(":
            self.take("(")
            left = self.sum()
            self.take(",")
            right = self.sum()
            self.take(")")
            return self.functions[token](left, right)
        if token in self.names:
            return self.names[token]
        self.position -= 1
        raise self.error()
