"""One file in KernelBench's format, opened in a sandbox: its task, its cases, its exact results.

The files are Python and run as such, so never in this process. What comes back is JSON and raw tensors, read as data.
Each open file has a sandbox and a folder of its own, which no other file has had: what one can leave in a process, on
disk or as a limit is more than one can look for.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cuda_l2.kernelbench import reference_server
from cuda_l2.kernelbench.arguments import TENSOR
from cuda_l2.kernelbench.examined import Effort, Examined, Readiness, Refused
from cuda_l2.kernelbench.files import Entry, read_source, revision_of
from cuda_l2.kernelbench.sandboxed import GONE, SandboxedPython
from cuda_l2.machine._base import Fault
from cuda_l2.records import DTYPE_BYTES, Operation, Task, VerdictStatus, from_json, to_json
from cuda_l2.system import process_tree, sandbox
from cuda_l2.system.closing import Closing
from cuda_l2.tasks._base import Tensors
from cuda_l2.tasks.cases import Case
from cuda_l2.tasks.tolerance import Bounds
from cuda_l2.tasks.values import Distribution

SERVER_BYTES = 1 << 30
"""Memory of a server with torch loaded, beside what its file takes."""
MAX_RESULT_BYTES = 8 << 20
MAX_REASON = 400


@dataclass(frozen=True)
class Call:
    """One launch of a module: inputs by name, numbers among them as numbers.

    weights: by their keys in the module's state, for a copy of the module that only this launch has; empty for the
    module as it is. result: structure of the result, see `arguments.structure`.
    """

    task: Task
    tensors: Tensors
    numbers: Mapping[str, bool | int | float]
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    result: str = TENSOR


@dataclass(frozen=True)
class ForeignCase(Case):
    """A case with what a module needs to run on it.

    numbers: inputs that are no tensors in the file. keys: of the module's state, by the weights' names. initial: the
    constructor's arguments, a list, or a dictionary of keywords; None where they are not plain data. result: structure
    of what forward returns. asked: what `OpenedFile.case` made it from.
    """

    task: Operation
    numbers: Mapping[str, bool | int | float] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    initial: Any = None
    result: str = TENSOR
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> Tensors:
        """By their keys in the module's state."""
        return {key: self.tensors[name] for name, key in self.keys.items()}

    @property
    def weights_seed(self) -> int:
        """Seed of the module's weights."""
        return int(self.asked["weights_seed"])

    def call(self, inputs: Tensors | None = None) -> Call:
        """A launch on these inputs, or on other ones of the same shapes, of the module as it is."""
        return Call(self.task, self.tensors if inputs is None else inputs, self.numbers, result=self.result)

    def call_of_its_own(self, given: Tensors) -> Call:
        """A launch on other inputs and weights, both by name, of a copy of the module."""
        return replace(self.call(given), weights={key: given[name] for name, key in self.keys.items()})


class OpenedFile(Closing):
    """One file in a sandbox that serves many runs, on CPUs each in a process forked for it. A context manager.

    A run that outlasts its time or takes the sandbox with it ends the sandbox; the next run starts another. Refused
    where the file cannot be read.
    """

    def __init__(self, entry: Entry, effort: Effort = Effort()) -> None:
        self.entry, self.effort = entry, effort
        self._text = read_source(entry.path)
        if revision_of(self._text) != entry.revision:
            raise Refused(Readiness.MALFORMED, "the file has changed since it was found")
        self._process: SandboxedPython | None = None
        self._sound = True
        """Whether the process can serve another run, as far as it says so."""

    @property
    def text(self) -> str:
        """The file's text, as it was when it was opened."""
        return self._text.decode(errors="replace")

    def examine(self, *, sizes: Mapping[str, int] | None = None, seed: int = 0) -> Examined:
        """Load it, run it, check that it can be a task. Never raises for what the file does."""
        try:
            return _read_examined(self._do("examine", sizes, seed=seed), self.entry)
        except Refused as refused:
            return Examined(self.entry.name, refused.status, refused.reason)

    def case(
        self,
        *,
        seed: int,
        sizes: Mapping[str, int] | None = None,
        distribution: Distribution | None = None,
        changed: str = "",
        wholly: bool = False,
        special: Sequence[tuple[str, int, float]] = (),
        weights_seed: int | None = None,
    ) -> ForeignCase:
        """Inputs, weights and bounds to judge a candidate by; Refused where the file does not give them.

        distribution: real numbers in place of the file's own inputs, which are often of one sign: there fp32 sums in
        an unlucky order are as far off as products in less. changed: a tensor of real numbers that has another value
        in one element than the same case otherwise has, or in all. special: tensors, places and what stands there.
        weights_seed: of the module's weights, where not `seed`.
        """
        job: dict[str, Any] = {"seed": seed, "distribution": distribution or "", "changed": changed, "wholly": wholly}
        job |= {"special": special, "weights_seed": seed if weights_seed is None else weights_seed}
        with self._failing():
            return replace(_read_case(self._do("case", sizes, **job), self.entry), asked=job | {"sizes": sizes})

    def inputs(
        self,
        *,
        seeds: Sequence[int],
        sizes: Mapping[str, int] | None = None,
        distribution: Distribution | None = None,
        results: bool = False,
    ) -> list[Tensors]:
        """Inputs by name as `case` has them, numbers left out, one set a seed; UserError where the file gives none.

        results: with numbers, weights and exact results too.
        """
        action = "results" if results else "inputs"
        with self._failing():
            folder = self._do(action, sizes, seeds=list(seeds), distribution=distribution or "")
            return _read_sets(folder, len(seeds))

    def close(self) -> None:
        if self._process:
            self._process.close()
            self._process = None

    def _begin(self) -> SandboxedPython:
        """A process that has torch loaded and this file's text."""
        device = self.effort.device
        return SandboxedPython(
            reference_server.__name__,
            {reference_server.TASK: self._text},
            memory_bytes=self.effort.memory_bytes + SERVER_BYTES,
            arguments=[device],
            devices=() if device == "cpu" else sandbox.gpu_devices(),
        )

    def _do(self, action: str, sizes: Mapping[str, int] | None, **job: Any) -> Path:
        """The folder with what the run left; Refused where it left nothing."""
        effort, entry = self.effort, self.entry
        job |= {"action": action, "sizes": dict(sizes or {}), "name": entry.name, "revision": entry.revision}
        job |= asdict(effort)
        if not self._sound:
            self.close()
        self._process = self._process or self._begin()
        try:
            answer = self._process.ask(job, effort.timeout_s)
            status = answer.get("status")
            if type(status) is not int:
                raise Fault(VerdictStatus.CRASHED, GONE)
            self._sound = answer.get("sound") is True
        except Fault as fault:
            self.close()
            if fault.status is VerdictStatus.TIMED_OUT:
                raise Refused(Readiness.TIMED_OUT, f"did not finish within {effort.timeout_s:.0f} s") from None
            refused = Readiness.TOO_LARGE if fault.reason == process_tree.OUT_OF_MEMORY else Readiness.CRASHED
            lost = "took the process that runs references with it"
            raise Refused(refused, lost if fault.reason == GONE else fault.reason) from None
        if status:
            what = f"signal {-status}" if status < 0 else f"status {status}"
            raise Refused(Readiness.CRASHED, f"its run ended by {what}{_said(self._process.folder)}")
        return self._process.folder

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Refused as refused:
            raise Refused(refused.status, refused.reason, str(self.entry.path)) from None


def examine(entry: Entry, effort: Effort = Effort(), *, seed: int = 0) -> Examined:
    """Try a file: load, run, check that it can be a task. Never raises for what the file does."""
    try:
        with OpenedFile(entry, effort) as file:
            return file.examine(seed=seed)
    except Refused as refused:
        return Examined(entry.name, refused.status, refused.reason)


def _read_examined(folder: Path, entry: Entry) -> Examined:
    with _reading("result"):
        examined = from_json(Examined, _read(folder / reference_server.RESULT, MAX_RESULT_BYTES).decode())
        if examined.name != entry.name or (examined.task and examined.task.revision != entry.revision):
            raise ValueError("another task")
        for text in (examined.reason, *examined.variable, *examined.distributions):
            if len(_require_line(text)) > MAX_REASON:
                raise ValueError("too long")
        if not all(isinstance(n, int | float) for n in (examined.seconds, examined.eager_max, examined.written_bytes)):
            raise ValueError("no number")
        if examined.task:
            _require_line(str(examined.task))
        if not all(isinstance(size, int) for _, size in examined.sizes):
            raise ValueError("no number")
        to_json(examined)
        return examined


def _said(folder: Path) -> str:
    """Why a run failed, as far as it says so, behind a colon."""
    try:
        text = _read(folder / reference_server.ERROR, 4 * MAX_REASON).decode()[:MAX_REASON]
    except Exception:  # noqa: BLE001 - it need not say anything, nor anything that can be read
        return ""
    return f": {text}" if text.isprintable() and text else ""


def _require_line(text: object) -> str:
    if not isinstance(text, str) or not text.isprintable():
        raise ValueError("no line of text")
    return text


def _read_case(folder: Path, entry: Entry) -> ForeignCase:
    with _reading("case"):
        header = _read_header(folder)
        task = from_json(Operation, json.dumps(header["task"]))
        if (task.name, task.revision) != (entry.name, entry.revision):
            raise ValueError("another task")
        parts = {(role, name): tensor for (role, name), tensor in _read_tensors(folder, header["tensors"])}
        bounds = tuple(
            Bounds(
                parts["exact", output.name],
                getattr(torch, output.dtype),
                parts["free", output.name],
                *(float(value) for value in header["bounds"][output.name]),
            )
            for output in task.outputs
        )
        tensors = {tensor.name: parts["given", tensor.name] for tensor in (*task.inputs, *task.weights)}
        numbers = {
            tensor.name: header["numbers"][tensor.name] for tensor in task.inputs if tensor.name in header["numbers"]
        }
        if not all(isinstance(number, bool | int | float) for number in numbers.values()):
            raise ValueError("no number")
        keys = {tensor.name: _require_line(header["keys"][tensor.name]) for tensor in task.weights}
        initial, result = header["initial"], _require_line(header["result"])
        if not isinstance(initial, list | dict | None):
            raise ValueError("no arguments")
        return ForeignCase(task, tensors, bounds, numbers, keys, initial, result)


def _read_sets(folder: Path, count: int) -> list[Tensors]:
    with _reading("tensors"):
        sets: list[Tensors] = [{} for _ in range(count)]
        for (index, name), tensor in _read_tensors(folder, _read_header(folder)["tensors"]):
            sets[int(index)][str(name)] = tensor
        return sets


def _read_header(folder: Path) -> dict[str, Any]:
    """A run's JSON; Refused where it says that it gives nothing."""
    header: dict[str, Any] = json.loads(_read(folder / reference_server.RESULT, MAX_RESULT_BYTES))
    if "status" in header:
        raise Refused(Readiness(header["status"]), _require_line(header["reason"])[:MAX_REASON])
    return header


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001 - data of any kind: an exception of our reader is the file's fault
        raise Refused(Readiness.CRASHED, f"left no {what} that can be read: {type(error).__name__}") from None


def _read_tensors(folder: Path, listed: list[list[Any]]) -> list[tuple[tuple[Any, Any], torch.Tensor]]:
    """Tensors that lie one after the other, each by the two words before its type and shape; in one memory."""
    sizes = [DTYPE_BYTES[dtype] * math.prod(shape) for _, _, dtype, shape in listed]
    places = [size + -size % reference_server.LINE for size in sizes]
    data = sandbox.read_all_left(folder / reference_server.TENSORS, sum(places))
    if data is None:
        raise ValueError(f"no {reference_server.TENSORS} of their size")
    found, offset = [], 0
    for (role, name, dtype, shape), size, taken in zip(listed, sizes, places, strict=True):
        kind = getattr(torch, dtype)
        count = size // DTYPE_BYTES[dtype]
        flat = torch.frombuffer(data, dtype=kind, count=count, offset=offset) if size else torch.empty(0, dtype=kind)
        found.append(((role, name), flat.reshape(shape)))
        offset += taken
    return found


def _read(path: Path, limit: int) -> bytes:
    data = sandbox.read_left(path, limit)
    if data is None:
        raise ValueError(f"no {path.name}")
    return data
