"""Plain data of a file as JSON and back, and the structure of a result: numbers, texts, lists, tuples, dictionaries."""

from typing import Any

TENSOR, COMPLEX = "tensor", "complex tensor"
_PLAIN = (bool, int, float, str, type(None))


def encode(value: Any) -> Any:
    """JSON that `decode` turns back into the value; ValueError for anything that is no plain data."""
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


def structure(value: Any, tensor: Any) -> str:
    """Structure of a result as text: `tensor`, `(tensor, tensor)` for a tuple or a list, `{'a': tensor}`, else a type.

    A complex tensor has a word of its own: its real and imaginary parts are compared. A list may stand for a tuple: C++
    extensions return lists. tensor: the class of tensors.
    """
    if isinstance(value, tensor):
        return COMPLEX if value.dtype.is_complex else TENSOR
    if isinstance(value, tuple | list):
        parts = [structure(part, tensor) for part in value]
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {structure(part, tensor)}' for key, part in value.items())}}}"
    return type(value).__name__
