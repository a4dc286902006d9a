"""A Hugging Face dataset on disk: Parquet files and a card, as on the Hub.

`datasets.load_dataset(FOLDER, NAME)` reads it; so does `read`, without the datasets package. Training reads
texts of it, and conversations that end in an answer.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_l2.llm._base import one_line
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported, whole, write_text
from cuda_l2.system.text import counted

CARD = "README.md"
MARK = "made by cuda-l2"
Rows = Sequence[Mapping[str, Any]]


def write(folder: Path, parts: Mapping[str, Rows], about: str) -> None:
    """Write the named parts, each with rows of equal columns, and a card; parts of an earlier card are replaced.

    Every file is whole or not there. UserError where it cannot be written.
    """
    pyarrow = _pyarrow()
    require_ours(folder)
    for name, rows in parts.items():
        with whole(folder / name / "train-00000-of-00001.parquet") as path:
            names = list(rows[0]) if rows else []
            pyarrow.parquet.write_table(pyarrow.table({name: [row[name] for row in rows] for name in names}), path)
    for old in {path.parent for path in folder.glob("*/train-*.parquet")}:
        if old.name not in parts:
            shutil.rmtree(old, ignore_errors=True)
    write_text(folder / CARD, _card(parts, about))


def write_lines(path: Path, lines: Rows) -> None:
    """JSON lines beside a dataset's parts, whole or as before, no file for none; UserError where that cannot be."""
    write_text(path, "".join(f"{json.dumps(line)}\n" for line in lines))
    if not lines:
        path.unlink()


def read(folder: Path, part: str) -> list[dict[str, Any]]:
    """The rows of one part; UserError where there is none."""
    return [row for _, row in located(folder, part)]


def located(data: Path, part: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a part, each with where it stands. UserError where there is none, or a file cannot be read.

    data: a folder of ours, a folder with files of a split for training, as on the Hub, or one such file: Parquet, JSON
    lines, or a JSON list of objects.
    """
    folder, files = data, [data] if data.is_file() else []
    for folder in (data / part, data / "data", data):
        files = files or sorted(path for path in folder.glob("*") if path.suffix in READERS)
        if files:
            break
    files = [path for path in files if path.name.startswith("train")] or files
    if not files:
        others = sorted({path.parent.name for path in data.glob("*/*") if path.suffix in READERS})
        has = f"it has {', '.join(others)}" if others else f"no {', '.join(READERS)} in it"
        raise UserError(f"{data} holds no dataset with a part {part}: {has}")
    found: list[tuple[str, dict[str, Any]]] = []
    for path in files:
        if path.suffix not in READERS:
            raise UserError(f"{path} cannot be read as data; give a file that ends in {', '.join(READERS)}")
        try:
            rows = READERS[path.suffix](path)
        except (OSError, ValueError, NotImplementedError, RecursionError) as error:
            raise UserError(f"cannot read {path}: {one_line(str(error), 200)}") from None
        for number, row in enumerate(rows, 1):
            where = f"{folder if len(files) == 1 and not data.is_file() else path}, row {number}"
            if not isinstance(row, dict):
                raise UserError(f"{where} is no object with columns, but of type {type(row).__name__}")
            found.append((where, row))
    return found


def require_ours(folder: Path) -> None:
    """UserError where the folder holds something that is no dataset of ours, which must not be written over."""
    _pyarrow()
    if folder.is_dir() and any(folder.iterdir()):
        card = folder / CARD
        state = [path for path in folder.iterdir() if path.suffix == ".jsonl"]
        if not state and not (card.is_file() and MARK in card.read_text(errors="replace")):
            raise UserError(f"{folder} holds other things; choose an empty folder with --out")
    elif folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose a folder with --out")
    parent = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryDirectory(dir=parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; choose another place with --out") from None


def _card(parts: Mapping[str, Rows], about: str) -> str:
    """The card's head names the parts and their files in the Hub's terms."""
    configs = [{"config_name": name, "data_files": [{"split": "train", "path": f"{name}/*.parquet"}]} for name in parts]
    counts = "\n".join(f"- `{name}`: {counted(len(rows), 'row')}" for name, rows in parts.items())
    head = json.dumps({"configs": configs}, indent=1)  # JSON is YAML
    return f"---\n{head}\n---\n\n# Dataset {MARK}\n\n{about.strip()}\n\n{counts}\n"


def _parquet_rows(path: Path) -> list[Any]:
    rows: list[Any] = _pyarrow().parquet.read_table(path).to_pylist()
    return rows


def _json_rows(path: Path) -> list[Any]:
    text = path.read_text("utf-8-sig")
    try:
        value = json.loads(text)
    except ValueError:
        return [_json_row(line, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return value if isinstance(value, list) else [value]


def _json_row(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is no JSON: {error}") from None


READERS = {".parquet": _parquet_rows, ".jsonl": _json_rows, ".json": _json_rows}


def _pyarrow() -> Any:
    imported("pyarrow.parquet", "datasets need", "llm")
    return imported("pyarrow", "datasets need", "llm")


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
    rows = located(data, part)
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
