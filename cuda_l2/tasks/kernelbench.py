"""KernelBench's tasks from a checkout of one's own: found here, run in a sandboxed process, believed in nothing.

The files are Python and run as such, so never in this process. What comes back is JSON and raw tensors, read as data.
Each run has a sandbox and a folder of its own: no file finds what an earlier one left, in memory or on disk, and we
write nothing into that folder once the file has run.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import cuda_l2
from cuda_l2 import sandbox, scratch
from cuda_l2.errors import UserError
from cuda_l2.records import DTYPE_BYTES, Operation, from_json, to_json
from cuda_l2.tasks import reference_server
from cuda_l2.tasks.examined import Examined, Readiness
from cuda_l2.tasks.tolerance import Bounds
from cuda_l2.tasks.values import Distribution

T = TypeVar("T")

LEVELS = (1, 2, 3)
START_TIMEOUT_S = 120.0
MAX_RESULT_BYTES = 8 << 20
MAX_SOURCE_BYTES = 1 << 20
MAX_REASON = 400


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a checkout. name: as a task's; revision: of the file's text."""

    name: str
    level: int
    revision: str
    path: Path


@dataclass(frozen=True, slots=True)
class Effort:
    """What one file may take. Budgets: sizes are halved until verifying fits them; 0 leaves sizes as written."""

    timeout_s: float = 120.0
    memory_bytes: int = 8 << 30
    budget_bytes: int = 1 << 28
    budget_flops: int = 4 * 10**9


@dataclass(frozen=True)
class Case:
    """Inputs and weights by name, and what each output may be."""

    task: Operation
    tensors: dict[str, torch.Tensor]
    bounds: dict[str, Bounds]


def entries(checkout: Path, levels: Sequence[int] = LEVELS) -> list[Entry]:
    """The files of these levels, in their own order; UserError where there are none."""
    found = []
    for level in levels:
        folders = [checkout / "KernelBench" / f"level{level}", checkout / f"level{level}"]
        folders += [checkout] if checkout.name == f"level{level}" else []
        for folder in folders:
            found += [_entry(path, level) for path in sorted(folder.glob("*.py"), key=_number)]
    if not found:
        raise UserError(
            f"no tasks in {checkout}: give the folder of a KernelBench checkout, which has KernelBench/level1/*.py"
        )
    return found


def _entry(path: Path, level: int) -> Entry:
    try:
        revision = _revision(_text(path))
    except _Lost:
        revision = ""  # running it says why
    return Entry(f"kernelbench/level{level}/{re.sub(r'[^A-Za-z0-9_.+-]', '_', path.stem)}", level, revision, path)


def _number(path: Path) -> tuple[int, str]:
    match = re.match(r"\d{1,9}", path.stem)
    return (int(match.group()) if match else 1 << 30, path.stem)


class References:
    """Runs files, each run in a sandbox of its own."""

    def __init__(self, effort: Effort = Effort()) -> None:
        self.effort = effort

    def examine(
        self, entry: Entry, *, sizes: Mapping[str, int] | None = None, seed: int = 0, parts: bool = False
    ) -> Examined:
        """Try a file: load, run, check that it can be a task. Never raises for what the file does."""
        job = {"action": "examine", "sizes": dict(sizes or {}), "seed": seed, "parts": parts}
        try:
            return self._run(entry, job, lambda folder: _read_examined(folder, entry))
        except _Lost as lost:
            return Examined(entry.name, lost.status, lost.reason)

    def case(
        self,
        entry: Entry,
        *,
        seed: int,
        sizes: Mapping[str, int] | None = None,
        distribution: Distribution | None = None,
    ) -> Case:
        """What to judge a candidate by; UserError where the file does not give it.

        distribution: real numbers in place of the file's own inputs, which are often of one sign: there fp32 sums in
        an unlucky order are as far off as products in less.
        """
        job = {"action": "case", "sizes": dict(sizes or {}), "seed": seed, "distribution": distribution or ""}
        try:
            return self._run(entry, job, lambda folder: _read_case(folder, entry))
        except _Lost as lost:
            raise UserError(f"{entry.path}: {lost.status}: {lost.reason}") from None

    def _run(self, entry: Entry, job: dict[str, Any], read: Callable[[Path], T]) -> T:
        effort = self.effort
        job |= {"name": entry.name, "revision": entry.revision, "memory_bytes": effort.memory_bytes}
        job |= {"budget_bytes": effort.budget_bytes, "budget_flops": effort.budget_flops}
        text = _text(entry.path)
        if _revision(text) != entry.revision:
            raise _Lost(Readiness.MALFORMED, "the file has changed since it was found")
        with contextlib.closing(_Server(text)) as server:
            return read(server.do(job, effort.timeout_s))


def examine_all(
    found: Sequence[Entry], effort: Effort = Effort(), *, seed: int = 0, parts: Sequence[int] = ()
) -> Iterator[Examined]:
    """Every file in turn. parts: levels whose files are also cut into parts."""
    references = References(effort)
    for entry in found:
        yield references.examine(entry, seed=seed, parts=entry.level in parts)


class _Lost(Exception):
    """No answer that can be used."""

    def __init__(self, status: Readiness, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class _Server:
    """One sandboxed process with torch loaded, for one run of one file."""

    def __init__(self, text: bytes) -> None:
        if sandbox.kind() is sandbox.Kind.LIMITS:
            raise UserError("there is no sandbox to run KernelBench's files in; apt install bubblewrap")
        self.folder = scratch.make_folder().resolve()
        (self.folder / reference_server.TASK).write_bytes(text)
        self._connection, theirs = socket.socketpair()
        search = [str(Path(path).absolute()) for path in sys.path if path]
        arguments = [sys.executable, "-I", str(Path(reference_server.__file__)), str(theirs.fileno())]
        command = sandbox.wrap([*arguments, json.dumps(search)], self.folder, reads=_readable())
        try:
            with theirs, tempfile.TemporaryFile() as log:
                self._process = sandbox.start(
                    command, pass_fds=(theirs.fileno(),), stdout=log, stderr=log, cwd=self.folder
                )
                theirs.close()
                try:
                    answer = self._answer(START_TIMEOUT_S)
                except (OSError, ValueError):
                    log.seek(0)
                    said = log.read(sandbox.MAX_OUTPUT_BYTES).decode(errors="replace").strip()
                    answer = {"error": said[-300:] or "no answer"}
            if "error" in answer:
                raise UserError(f"the process for KernelBench's files does not start: {answer['error']}")
        except BaseException:
            self.close()
            raise

    def do(self, job: dict[str, Any], timeout_s: float) -> Path:
        """The folder with what the file left, no process of its own left to change it; _Lost where it left nothing."""
        try:
            self._connection.sendall(json.dumps(job).encode() + b"\n")
            status = self._answer(timeout_s).get("status")
            if type(status) is not int:
                raise ValueError("no status")
        except TimeoutError:
            raise _Lost(Readiness.TIMED_OUT, f"did not finish within {timeout_s:.0f} s") from None
        except (OSError, ValueError):
            raise _Lost(Readiness.CRASHED, "took the process that runs references with it") from None
        finally:
            self._end()
        if status:
            what = f"signal {-status}" if status < 0 else f"status {status}"
            raise _Lost(Readiness.CRASHED, f"its process ended by {what}")
        return self.folder

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            answer = json.loads(sandbox.receive_line(self._connection, timeout_s, MAX_RESULT_BYTES))
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(answer, dict):
            raise ValueError("no object")
        return answer

    def _end(self) -> None:
        if hasattr(self, "_process"):
            sandbox.kill(self._process)  # with it goes every process of its namespace
            self._process.wait()

    def close(self) -> None:
        self._end()
        self._connection.close()
        scratch.remove(self.folder)


def _text(path: Path) -> bytes:
    """A regular file's bytes; _Lost for links, pipes, what is too long or cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _Lost(Readiness.MALFORMED, "not a regular file")
            text = file.read(MAX_SOURCE_BYTES + 1)
    except OSError as error:
        reason = "not a regular file" if path.is_symlink() else f"cannot be read: {error.strerror}"
        raise _Lost(Readiness.MALFORMED, reason) from None
    if len(text) > MAX_SOURCE_BYTES:
        raise _Lost(Readiness.MALFORMED, f"the file is longer than {MAX_SOURCE_BYTES} bytes")
    return text


def _revision(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:12]


def _read_examined(folder: Path, entry: Entry) -> Examined:
    try:
        examined = from_json(Examined, _read(folder / reference_server.RESULT, MAX_RESULT_BYTES).decode())
        if examined.name != entry.name or (examined.task and examined.task.revision != entry.revision):
            raise ValueError("another task")
        for text in (examined.reason, examined.untraceable, *examined.variable, *examined.distributions):
            if len(_require_line(text)) > MAX_REASON:
                raise ValueError("too long")
        if not all(isinstance(n, int | float) for n in (examined.seconds, examined.eager_max, examined.written_bytes)):
            raise ValueError("no number")
        for task in filter(None, (examined.task, *examined.parts)):
            _require_line(str(task))
        to_json(examined)
    except Exception as error:  # noqa: BLE001 - JSON of any kind: what it makes our code raise is its fault
        raise _Lost(Readiness.CRASHED, f"left no result that can be read: {type(error).__name__}") from None
    return examined


def _require_line(text: object) -> str:
    if not isinstance(text, str) or not text.isprintable():
        raise ValueError("no line of text")
    return text


def _read_case(folder: Path, entry: Entry) -> Case:
    try:
        header = json.loads(_read(folder / reference_server.RESULT, MAX_RESULT_BYTES))
        if "status" in header:
            raise _Lost(Readiness(header["status"]), _require_line(header["reason"])[:MAX_REASON])
        task = from_json(Operation, json.dumps(header["task"]))
        if (task.name, task.revision) != (entry.name, entry.revision):
            raise ValueError("another task")
        sizes = [DTYPE_BYTES[dtype] * math.prod(shape) for _, _, dtype, shape in header["tensors"]]
        data = bytearray(_read(folder / reference_server.TENSORS, sum(sizes)))
        if len(data) != sum(sizes):
            raise ValueError("short")
        parts: dict[tuple[str, str], torch.Tensor] = {}
        offset = 0
        for (role, name, dtype, shape), size in zip(header["tensors"], sizes, strict=True):
            raw = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=offset) if size else torch.empty(0)
            parts[role, name] = raw.clone().view(getattr(torch, dtype)).reshape(shape)
            offset += size
        bounds = {
            output.name: Bounds(
                parts["exact", output.name],
                getattr(torch, output.dtype),
                parts["free", output.name],
                *(float(value) for value in header["bounds"][output.name]),
            )
            for output in task.outputs
        }
        tensors = {tensor.name: parts["given", tensor.name] for tensor in (*task.inputs, *task.weights)}
    except _Lost:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        raise _Lost(Readiness.CRASHED, f"left no case that can be read: {type(error).__name__}") from None
    return Case(task, tensors, bounds)


def _read(path: Path, limit: int) -> bytes:
    data = sandbox.read_left(path, limit)
    if data is None:
        raise ValueError(f"no {path.name}")
    return data


def _readable() -> list[Path]:
    """What the process must read beside the system's folders: Python, its packages, this package."""
    package = Path(cuda_l2.__file__).parent
    folders = [Path(sys.prefix), Path(sys.base_prefix), package]
    folders += [Path(path) for path in sys.path if path.endswith("-packages")]
    folders += [path.resolve() for path in folders]
    system = (Path("/"), Path("/usr"))
    return [path for path in dict.fromkeys(folders) if path not in system and Path("/usr") not in path.parents]
