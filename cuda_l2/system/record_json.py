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
from collections.abc import Callable, Mapping, Sequence
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


def _restore(kind: Any, value: Any) -> Any:
    """Rebuild `value` (plain JSON) as `kind` from its type annotations."""
    read = _reader(kind)
    return value if read is None or value is None else read(value)


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any] | None:
    """What rebuilds a value that is not None; None where JSON has it as it is. Made once: archives hold millions."""
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    for record in (origin, kind):  # a record's parameters are plain
        if isinstance(record, type) and dataclasses.is_dataclass(record):
            return functools.partial(_read_record, record)
    if origin in (typing.Union, types.UnionType):
        kinds = [p for p in parameters if p is not type(None)]
        return _reader(kinds[0]) if len(kinds) == 1 else functools.partial(_read_one_of, kinds)
    if origin is tuple and parameters[-1] is Ellipsis:
        read = _reader(parameters[0])
        return tuple if read is None else lambda value: tuple(None if item is None else read(item) for item in value)
    if origin is tuple:
        return lambda value: tuple(_restore(p, item) for p, item in zip(parameters, value, strict=True))
    return kind if isinstance(kind, type) and issubclass(kind, enum.Enum) else None


def _read_one_of(kinds: Sequence[Any], value: Any) -> Any:
    """The one of several records that has these fields."""
    return _restore(next(kind for kind in kinds if set(value) <= set(kind.__dataclass_fields__)), value)


def _read_record(kind: Any, value: Mapping[str, Any]) -> Any:
    fields, sparse, gone = _fields(kind), _sparse(kind), getattr(kind, "GONE", ())
    found = {}
    for stored, item in value.items():
        if stored in gone or (sparse and stored not in fields):
            continue
        name, read = fields[stored]
        found[name] = item if read is None or item is None else read(item)
    return kind(**found)


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[str, Callable[[Any], Any] | None]]:
    """The fields of a record's class by their names in JSON, and by their own, each with what rebuilds its value."""
    hints = typing.get_type_hints(kind)
    names = {name: name for name, _ in _names(kind)} | {stored: name for name, stored in _names(kind)}
    return {stored: (name, _reader(hints[name])) for stored, name in names.items()}
