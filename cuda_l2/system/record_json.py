"""Frozen dataclasses as JSON text, and back from their type annotations. Standard library only.

A class may name constants: `STORED_AS`, fields whose JSON name is another; `GONE`, fields of earlier versions, dropped
when they are read; and `SPARSE`, which leaves out what is None or empty. Of a sparse record, all names that this
version does not know are dropped.
"""

import dataclasses
import enum
import functools
import json
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_json(record: Any) -> str:
    """A record as JSON text; NaN and infinities as Python's json writes them."""
    return json.dumps(_stored(record), separators=(",", ":"))


def from_json(kind: type[T], text: str) -> T:
    """The record of this kind that `to_json` wrote."""
    value: T = _restore(kind, json.loads(text))
    return value


def _stored(value: Any) -> Any:
    kind: Any = type(value)
    if kind in (str, float, int, bool, type(None)):  # most values
        return value
    if isinstance(value, dict):
        return {name: _stored(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stored(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    found = {stored: getattr(value, name) for name, stored in _names(kind)}
    if _sparse(kind):
        found = {name: item for name, item in found.items() if item not in (None, "", {})}
    return {name: _stored(item) for name, item in found.items()}


@functools.cache
def _names(kind: Any) -> list[tuple[str, str]]:
    """The fields of a record's class, each with its name in JSON."""
    names = getattr(kind, "STORED_AS", {})
    return [(field.name, names.get(field.name, field.name)) for field in dataclasses.fields(kind)]


def _sparse(kind: type) -> bool:
    return bool(getattr(kind, "SPARSE", False))


_hints = functools.cache(typing.get_type_hints)


def _restore(kind: Any, value: Any) -> Any:
    """Rebuild `value` (plain JSON) as `kind` from its type annotations."""
    if value is None:
        return None
    if dataclasses.is_dataclass(typing.get_origin(kind)):  # its parameters are plain
        kind = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        fields = {stored: name for name, stored in getattr(kind, "STORED_AS", {}).items()}
        found = {fields.get(name, name): item for name, item in value.items()}
        for name in getattr(kind, "GONE", ()):
            found.pop(name, None)
        if _sparse(kind):
            known = {field.name for field in dataclasses.fields(kind)}
            found = {name: item for name, item in found.items() if name in known}
        return kind(**{name: _restore(hints[name], item) for name, item in found.items()})
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = [p for p in parameters if p is not type(None)]
        # of several records, the one that has these fields
        return _restore(next(p for p in kinds if len(kinds) == 1 or set(value) <= set(p.__dataclass_fields__)), value)
    if origin is tuple:
        if parameters[-1] is Ellipsis:
            return tuple(_restore(parameters[0], item) for item in value)
        return tuple(_restore(p, item) for p, item in zip(parameters, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    return value
