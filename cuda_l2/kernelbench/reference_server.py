"""The program inside the sandbox that runs one of KernelBench's files, on CPUs in a child of its own.

On a GPU in this process: one that has CUDA cannot give it to a child, and each would take seconds to set it up.

Started by opened.py for every file, in a folder with `task.py`. It reads jobs, a JSON line each, from its socket
and answers each with one line. A job examines the file, or leaves a case, inputs or exact results: `result.json` in the
folder, and `tensors` beside it; where it fails, `error` may say why.
What a run does to its process (memory, time, a crash) it does to its child, or to this program, which is then started
anew. Ends when the socket closes, and its child too.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import threading
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cuda_l2.build.compile_server import in_child
from cuda_l2.kernelbench.arguments import encode
from cuda_l2.kernelbench.examined import Effort, Examined, Readiness, Refused
from cuda_l2.kernelbench.file import Loaded
from cuda_l2.kernelbench.reference import Reference, changed, examine, parameter_names, reference, warm_up
from cuda_l2.records import to_json
from cuda_l2.system.loading import loading
from cuda_l2.system.text import line_of
from cuda_l2.tasks.tolerance import widened
from cuda_l2.tasks.values import Distribution
from cuda_l2.tasks.warm import set_full_precision

TASK, RESULT, TENSORS, ERROR = "task.py", "result.json", "tensors", "error"
LINE = 64
"""Tensors lie at multiples of 64 bytes of their file, so that they can be used where they are read."""
LIBRARIES_BYTES = 8 << 30
"""Address space that torch's libraries and threads take beside what they work on."""


def main() -> None:
    """Arguments: the socket's descriptor, the device."""
    connection, on_cpu = socket.socket(fileno=int(sys.argv[1])), sys.argv[2] == "cpu"
    try:
        with loading():
            warm_up()
        if not on_cpu:
            set_full_precision()
        answer: dict[str, Any] = {"ready": True}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells the user
        answer = {"error": line_of(error)}
    _send(connection, answer)
    if not on_cpu:
        _end_with(connection)
    for line in connection.makefile("r", encoding="utf-8"):
        job = json.loads(line)
        most = job["memory_bytes"]
        limits = {resource.RLIMIT_FSIZE: most, resource.RLIMIT_CORE: 0}
        for name in (RESULT, TENSORS, ERROR):
            Path(name).unlink(missing_ok=True)  # no run's answer is taken for another's
        if on_cpu:
            limits[resource.RLIMIT_AS] = most + LIBRARIES_BYTES
            status, sound = in_child(connection, limits, partial(_answered, job)), True
        else:
            for limit, value in limits.items():  # CUDA reserves more address space than there is memory
                resource.setrlimit(limit, (value, value))
            status, sound = _answered(job), _settled()
        _send(connection, {"status": status, "sound": sound})


def _settled() -> bool:
    """Whether CUDA works after a run: an error on the device stays with the process."""
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:  # noqa: BLE001 - of whatever kind
        return False
    return True


def _end_with(connection: socket.socket) -> None:
    """End this process group once the other end of the socket is gone; runs are not in a child that could be left."""

    def watch() -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLRDHUP)
        poll.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _answered(job: dict[str, Any]) -> int:
    try:
        do(job)
        return 0
    except BaseException as error:  # noqa: BLE001 - other people's Python, which may ask to exit too
        Path(ERROR).write_text(line_of(error), errors="replace")
        return 1


def do(job: dict[str, Any]) -> None:
    """Leave a job's answer in the folder."""
    try:
        {"examine": _examine, "case": _case, "inputs": _inputs, "results": _results}[job["action"]](job)
    except MemoryError:
        refused = Examined(job["name"], Readiness.TOO_LARGE, "does not fit in memory")
        Path(RESULT).write_text(to_json(refused))
    except Refused as error:
        Path(RESULT).write_text(to_json(Examined(job["name"], error.status, error.reason or "refused")))


def _examine(job: dict[str, Any]) -> None:
    examined = examine(
        *(Path(TASK).resolve(), job["name"], job["revision"]),
        sizes=job["sizes"],
        seed=job["seed"],
        effort=Effort(**{field.name: job[field.name] for field in fields(Effort)}),
    )
    Path(RESULT).write_text(to_json(examined))


def _loaded(job: dict[str, Any]) -> Loaded:
    return Loaded(Path(TASK).resolve(), job["sizes"], job["device"])


def _distribution(job: dict[str, Any]) -> Distribution | None:
    return Distribution(job["distribution"]) if job["distribution"] else None


def _reference(job: dict[str, Any], loaded: Loaded, seed: int, weights_seed: int) -> Reference:
    return reference(loaded, job["name"], job["revision"], job["sizes"], seed, _distribution(job), weights_seed)


def _case(job: dict[str, Any]) -> None:
    """Inputs, weights and the bounds of each output: a header, and the tensors' bytes one after the other."""
    loaded = _loaded(job)
    found = _reference(job, loaded, job["seed"], job["weights_seed"])
    if name := job["changed"]:
        how = {"wholly": job["wholly"], "weight": name in found.keys}
        found.tensors[name] = changed(found.tensors[name], job["seed"], **how)
    for name, at, value in job["special"]:
        found.tensors[name] = found.tensors[name].clone(memory_format=torch.contiguous_format)
        found.tensors[name].view(-1)[at] = value
    limits = dict(zip([tensor.name for tensor in found.task.outputs], found.bounds(), strict=True))
    values = found.values()
    tensors = {name: torch.as_tensor(value) for name, value in values.items()} | found.tensors  # changed ones
    listed = [("given", name, tensor) for name, tensor in tensors.items()]
    for name, limit in limits.items():
        listed += [("exact", name, limit.exact), ("free", name, limit.free)]
    header = {
        "task": json.loads(to_json(found.task)),
        "bounds": {
            n: [b.rms_allowed, b.max_allowed, b.eager_rms, b.eager_max, b.least, b.most] for n, b in limits.items()
        },
        "numbers": {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)},
        "keys": found.keys,
        "initial": _plain(loaded.arguments()),
        "result": found.result,
    }
    _leave(header, listed)


def _results(job: dict[str, Any]) -> None:
    """Inputs and weights for several seeds, and the exact results, without bounds."""
    loaded = _loaded(job)
    listed: list[tuple[Any, str, Any]] = []
    for index, seed in enumerate(job["seeds"]):
        found = _reference(job, loaded, seed, seed)
        given = {name: torch.as_tensor(value) for name, value in found.values().items()} | found.tensors
        with torch.no_grad():
            exact = found.function(**widened(found.tensors))
        results = {tensor.name: value for tensor, value in zip(found.task.outputs, exact, strict=True)}
        listed += [(index, name, tensor) for name, tensor in (*given.items(), *results.items())]
    _leave({}, listed)


def _inputs(job: dict[str, Any]) -> None:
    """The file's own inputs for several seeds, without running its module."""
    loaded, distribution = _loaded(job), _distribution(job)
    names = parameter_names(loaded.model(0), len(loaded.inputs(0)))
    listed = [
        (index, name, value)
        for index, seed in enumerate(job["seeds"])
        for name, value in zip(names, loaded.inputs(seed + 1, distribution), strict=True)
        if isinstance(value, torch.Tensor)
    ]
    _leave({}, listed)


def _leave(header: dict[str, Any], listed: list[tuple[Any, str, Any]]) -> None:
    """A header that names the tensors, and their bytes. listed: two words each tensor is known by, and the tensor."""

    with Path(TENSORS).open("wb") as file:
        for _, _, tensor in listed:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            file.write(data)  # as it lies there: tensors may be gigabytes
            file.write(bytes(-data.size % LINE))
    tensors = [(role, name, str(t.dtype).removeprefix("torch."), list(t.shape)) for role, name, t in listed]
    Path(RESULT).write_text(json.dumps(header | {"tensors": tensors}))


def _plain(value: Any) -> Any:
    """A constructor's arguments as data; None where they are none."""

    try:
        return encode(value)
    except (ValueError, RecursionError):
        return None
