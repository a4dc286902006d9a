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
    """The column text of each dataset; UserError with the row that has none."""
    found: list[str] = []
    for folder in folders:
        for where, row in _rows(folder, TEXT, "text"):
            if not isinstance(row["text"], str):
                raise UserError(f"{where}: text is {_kind(row['text'])}; give it one, or leave the row out")
            found.append(row["text"])
    return found


def conversations(folders: Sequence[Path]) -> Conversations:
    """The column messages of each dataset. UserError with the row where one cannot be read, or where none is left."""
    found, unanswered = [], []
    for folder in folders:
        for where, row in _rows(folder, CONVERSATIONS, "messages"):
            turns = _turns(where, row["messages"])
            if turns:
                found.append(turns)
            else:
                unanswered.append(where)
    if unanswered and not found:
        raise UserError(f"no conversation of {', '.join(map(str, folders))} ends in an answer of the assistant's")
    return Conversations(found, unanswered)


def _rows(folder: Path, part: str, column: str) -> list[tuple[str, dict[str, Any]]]:
    rows = dataset.read(folder, part)
    if rows and column not in rows[0]:
        raise UserError(f"{folder}/{part} has no column {column}; it has {', '.join(rows[0])}: rename or convert them")
    return [(f"{folder}/{part}, row {number}", row) for number, row in enumerate(rows, 1)]


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
