"""Reads what training learns from: texts, and conversations that end in an answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_l2.corpus import dataset
from cuda_l2.system.errors import UserError

TEXT, CONVERSATIONS = "text", "sft"
"""Parts of a dataset."""
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Conversations:
    """Messages with role and content, the last the assistant's, and where those lie that end otherwise."""

    found: list[list[dict[str, str]]]
    unanswered: list[str]


def texts(folders: Sequence[Path]) -> list[str]:
    """The column text of each file or folder; UserError with the row that has none."""
    found: list[str] = []
    for folder in folders:
        for where, text in _rows(folder, TEXT, "text"):
            if not isinstance(text, str):
                raise UserError(f"{where}: text is {_kind(text)}; give it one, or leave the row out")
            found.append(text)
    return found


def conversations(folders: Sequence[Path]) -> Conversations:
    """The column messages of each file or folder. UserError with the row that cannot be read, or where none is left."""
    found, unanswered = [], []
    for folder in folders:
        for where, messages in _rows(folder, CONVERSATIONS, "messages"):
            turns = _turns(where, messages)
            if turns:
                found.append(turns)
            else:
                unanswered.append(where)
    if unanswered and not found:
        raise UserError(f"no conversation of {', '.join(map(str, folders))} ends in an answer of the assistant's")
    return Conversations(found, unanswered)


def _rows(data: Path, part: str, column: str) -> list[tuple[str, Any]]:
    """The column of each row, with where it stands."""
    rows = dataset.located(data, part)
    for where, row in rows[:1]:
        if column not in row:
            raise UserError(
                f"{where.rpartition(',')[0]} has no column {column}; it has {', '.join(row)}: rename or convert them"
            )
    return [(where, row.get(column)) for where, row in rows]


def _turns(where: str, messages: Any) -> list[dict[str, str]]:
    """The messages of a row; empty where they end in no answer."""
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise UserError(f"{where}: messages is {_kind(messages)}, not a list of messages with role and content")
    if not messages or messages[-1].get("role") == "user":
        return []
    for i, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"{where}: the role of message {i} is {role!r}; it must be one of {', '.join(ROLES)}")
        if role == "assistant" and i == len(messages) and not (isinstance(content, str) and content.strip()):
            return []
        if not isinstance(content, str):
            raise UserError(f"{where}: the content of message {i} is {_kind(content)}; give it a text")
    if messages[-1]["role"] != "assistant":
        return []
    if len(messages) < 2:
        raise UserError(f"{where}: the answer has no question before it")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _kind(value: Any) -> str:
    return "empty" if value is None else f"of type {type(value).__name__}"
