"""Expressions of whole numbers in launch contracts: a small recursive-descent parser, never eval."""

import functools
import re
from collections.abc import Callable, Mapping

MAX_EXPRESSION_LENGTH = 2000
MAX_VALUE = 1 << 62
_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(.))")


class ContractError(ValueError):
    """The source's contract is missing or says something that cannot be."""


def evaluate(expression: str, names: Mapping[str, int]) -> int:
    """The value of an expression of whole numbers, names, + - * / %, parentheses and min, max, cdiv.

    `/` rounds down, `cdiv(a, b)` up. Anything else, a division by zero, a negative result or one
    beyond 2^62 raises ContractError.
    """
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ContractError(f"expression of more than {MAX_EXPRESSION_LENGTH} characters")
    return _value(expression, tuple(names.items()))


@functools.lru_cache(maxsize=1024)
def _value(expression: str, names: tuple[tuple[str, int], ...]) -> int:
    """Once, where every launch asks for the same."""
    value = _Expression(expression, dict(names)).value()
    if value < 0:
        raise ContractError(f"{expression!r} is negative: {value}")
    return value


@functools.lru_cache(maxsize=256)
def _tokens(text: str) -> tuple[str, ...]:
    """Once, where a table evaluates one expression hundreds of times."""
    return tuple(match.group().strip() for match in _TOKEN.finditer(text.strip()))


class _Expression:
    """Recursive descent over: sum = product {(+|-) product}; product = atom {(*|/|%) atom}."""

    functions: Mapping[str, Callable[[int, int], int]] = {"min": min, "max": max, "cdiv": lambda a, b: -(-a // b)}
    max_depth = 40

    def __init__(self, text: str, names: Mapping[str, int]) -> None:
        self.text, self.names = text, names
        self.tokens = _tokens(text)
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
