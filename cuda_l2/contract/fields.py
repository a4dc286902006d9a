"""Typed access to the TOML tables of a contract; errors name the place."""

import re
from collections.abc import Sequence
from typing import Any, NoReturn

from cuda_l2.contract.expressions import ContractError

NAME = re.compile(r"[A-Za-z_]\w{0,62}", re.ASCII)


class Fields:
    """One table; what is left over at the end is an error."""

    def __init__(self, fields: Any, where: str = "the contract") -> None:
        if not isinstance(fields, dict):
            raise ContractError(f"{where} must be a table")
        self.fields, self.where, self._known = dict(fields), where, set[str]()

    def fail(self, what: str) -> NoReturn:
        raise ContractError(f"{self.where}: {what}")

    def pop(self, key: str, default: Any = None) -> Any:
        """A field as TOML gave it."""
        self._known.add(key)
        return self.fields.pop(key, default)

    def has(self, key: str) -> bool:
        self._known.add(key)
        return key in self.fields

    def one_of(self, key: str, values: Sequence[str], default: str | None = None) -> str:
        value = self.pop(key, default)
        if value not in values:
            self.fail(f"{key} must be one of {', '.join(values)}" + ("" if value is None else f", not {value!r}"))
        return str(value)

    def some_of(self, key: str, values: Sequence[str]) -> tuple[str, ...]:
        """A list of some of these, in their order; all where it is left out."""
        found = self.pop(key, list(values))
        if not isinstance(found, list) or not found or not all(value in values for value in found):
            self.fail(f"{key} must be a list of some of {', '.join(values)}, not {found!r}")
        return tuple(value for value in values if value in found)

    def name(self, key: str, default: str | None = None) -> str:
        return self.identifier(self.pop(key, default), key)

    def identifier(self, value: Any, what: str) -> str:
        """A value that must be a name that C takes."""
        if not isinstance(value, str) or not NAME.fullmatch(value):
            self.fail(f"{what} must be a C identifier, not {value!r}")
        return value

    def boolean(self, key: str) -> bool:
        value = self.pop(key, False)
        if not isinstance(value, bool):
            self.fail(f"{key} must be true or false")
        return value

    def number(self, key: str, default: int, least: int, most: int) -> int:
        value = self.pop(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.fail(f"{key} must be a whole number from {least} to {most}, not {value!r}")
        return value

    def expression(self, key: str, default: int | None = None) -> str:
        return self.read_expression(self.pop(key, default), key)

    def read_expression(self, value: Any, what: str) -> str:
        """A value that must be a whole number or an expression, as text."""
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            self.fail(f"{what} must be a whole number or an expression in quotes, not {value!r}")
        return str(value).strip()

    def expressions(self, key: str, count: range, default: Sequence[int] | None = None) -> tuple[str, ...]:
        values = self.pop(key, default)
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) not in count:
            numbers = str(count[0]) if len(count) == 1 else f"{count[0]} to {count[-1]}"
            self.fail(f"{key} must be a list of {numbers} numbers or expressions")
        return tuple(self.read_expression(value, key) for value in values)

    def table(self, key: str) -> list[tuple[str, Any]]:
        value = self.pop(key, {})
        if not isinstance(value, dict):
            self.fail(f"[{key}] must be a table")
        return list(value.items())

    def list_of(self, key: str) -> list["Fields"]:
        values = self.pop(key, [])
        if not isinstance(values, list):
            self.fail(f"write [[{key}]] with double brackets")
        return [Fields(value, f"[[{key}]] {index + 1}") for index, value in enumerate(values)]

    def finish(self) -> None:
        if self.fields:
            known = ", ".join(sorted(self._known))
            self.fail(f"unknown fields: {', '.join(sorted(self.fields))}; known fields: {known}")
