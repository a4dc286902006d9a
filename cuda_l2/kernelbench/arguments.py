"""A module constructor's arguments as JSON and back: numbers, texts, lists, tuples, dictionaries."""

from typing import Any

_PLAIN = (bool, int, float, str, type(None))


def encode(value: Any) -> Any:
    """What `decode` gives back as it was; ValueError for anything that is no plain data."""
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [encode(part) for part in value]
    if type(value) is tuple:
        return {"tuple": [encode(part) for part in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: encode(part) for key, part in value.items()}}
    raise ValueError(f"a {type(value).__name__} is no plain data")


def decode(value: Any) -> Any:
    if type(value) is list:
        return [decode(part) for part in value]
    if type(value) is dict:
        if "tuple" in value:
            return tuple(decode(part) for part in value["tuple"])
        return {key: decode(part) for key, part in value["dict"].items()}
    return value
