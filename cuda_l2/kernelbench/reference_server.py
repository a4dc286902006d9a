"""The program inside the sandbox that runs one of KernelBench's files, on CPUs in a child of its own.

On a GPU in this process: one that has CUDA cannot give it to a child, and each would take seconds to set it up.

Started by kernelbench.py for every file, in a folder with `task.py`. It reads jobs, a JSON line each, from its socket
and answers each with one line. A run leaves `result.json` in the folder, and `tensors` where a case was asked for;
where it fails, `error` may say why.
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
from functools import partial
from pathlib import Path
from typing import Any

TASK, RESULT, TENSORS, ERROR = "task.py", "result.json", "tensors", "error"
LINE = 64
"""Tensors are left at multiples of so many bytes, so that they can be used where they are read."""
LIBRARIES_BYTES = 8 << 30
"""Address space that torch's libraries and threads take beside what they work on."""


def main() -> None:
    """Arguments: the socket's descriptor, the module search path as JSON, the device."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = json.loads(sys.argv[2])
    os.environ["USER"] = "sandbox"  # torch asks for a name, and there is no /etc/passwd
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin after their work would slow what else runs
    try:
        from cuda_l2.kernelbench import foreign  # noqa: PLC0415 - where the search path is set
        from cuda_l2.tasks.warm import set_full_precision  # noqa: PLC0415

        foreign.warm_up()
        if sys.argv[3] != "cpu":
            set_full_precision()
        answer: dict[str, Any] = {"ready": True}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells the user
        answer = {"error": f"{type(error).__name__}: {error}"}
    _send(connection, answer)
    from cuda_l2.build.compile_server import in_child  # noqa: PLC0415

    if sys.argv[3] != "cpu":
        _end_with(connection)
    for line in connection.makefile("r", encoding="utf-8"):
        job = json.loads(line)
        most = job["memory_bytes"]
        limits = {resource.RLIMIT_FSIZE: most, resource.RLIMIT_CORE: 0}
        for name in (RESULT, TENSORS, ERROR):
            Path(name).unlink(missing_ok=True)  # no run's answer is taken for another's
        if sys.argv[3] == "cpu":
            limits[resource.RLIMIT_AS] = most + LIBRARIES_BYTES
            status, sound = in_child(connection, limits, partial(_answered, job)), True
        else:
            for limit, value in limits.items():  # CUDA reserves more address space than there is memory
                resource.setrlimit(limit, (value, value))
            status, sound = _answered(job), _settled()
        _send(connection, {"status": status, "sound": sound})


def _settled() -> bool:
    """Whether CUDA works after a run: an error on the device stays with the process."""
    import torch  # noqa: PLC0415

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
        return _do(job)
    except BaseException as error:  # noqa: BLE001 - other people's Python, which may ask to exit too
        from cuda_l2.system.text import line_of  # noqa: PLC0415

        Path(ERROR).write_text(line_of(error), errors="replace")
        return 1


def _do(job: dict[str, Any]) -> int:
    from cuda_l2.kernelbench import foreign  # noqa: PLC0415
    from cuda_l2.kernelbench.examined import Examined, Readiness  # noqa: PLC0415
    from cuda_l2.kernelbench.file import Refused  # noqa: PLC0415
    from cuda_l2.records import to_json  # noqa: PLC0415

    path, name, revision = Path(TASK).resolve(), job["name"], job["revision"]
    try:
        if job["action"] == "case":
            _case(path, job)
            return 0
        if job["action"] == "inputs":
            _inputs(path, job)
            return 0
        if job["action"] == "results":
            _results(path, job)
            return 0
        examined = foreign.examine(
            *(path, name, revision),
            sizes=job["sizes"],
            seed=job["seed"],
            limits=foreign.Limits(job["memory_bytes"], job["budget_bytes"], job["budget_flops"]),
            parts=job["parts"],
            device=job["device"],
        )
    except MemoryError:
        examined = Examined(name, Readiness.TOO_LARGE, "does not fit in memory")
    except Refused as refused:
        examined = Examined(name, refused.status, refused.reason or "refused")
    Path(RESULT).write_text(to_json(examined))
    return 0


def _case(path: Path, job: dict[str, Any]) -> None:
    """Inputs, weights and what each output may be: a header, and the tensors' bytes one after the other."""
    import torch  # noqa: PLC0415

    from cuda_l2.kernelbench import foreign  # noqa: PLC0415
    from cuda_l2.kernelbench.file import Loaded  # noqa: PLC0415
    from cuda_l2.records import to_json  # noqa: PLC0415
    from cuda_l2.tasks.values import Distribution  # noqa: PLC0415

    sizes, distribution = job["sizes"], Distribution(job["distribution"]) if job["distribution"] else None
    loaded = Loaded(path, sizes)
    found = foreign.reference(
        *(loaded, job["name"], job["revision"], sizes, job["seed"], distribution),
        device=job["device"],
        weights_seed=job["weights_seed"],
    )
    if job["changed"]:
        name = job["changed"]
        how = {"wholly": job["wholly"], "weight": name in found.keys}
        found.tensors[name] = foreign.changed(found.tensors[name], job["seed"], **how)
    for name, at, value in job["special"]:
        found.tensors[name] = found.tensors[name].clone(memory_format=torch.contiguous_format)
        found.tensors[name].view(-1)[at] = value
    limits = found.bounds()
    outputs = [tensor.name for tensor in found.task.outputs]
    given = zip(found.task.inputs, found.inputs, strict=True)
    values = {tensor.name: value for tensor, value in given}
    tensors = {name: torch.as_tensor(value) for name, value in values.items()} | found.tensors  # changed ones
    listed = [("given", name, tensor) for name, tensor in tensors.items()]
    for name, limit in zip(outputs, limits, strict=True):
        listed += [("exact", name, limit.exact), ("free", name, limit.free)]
    header = {
        "task": json.loads(to_json(found.task)),
        "bounds": {
            name: [limit.rms_allowed, limit.max_allowed, limit.eager_rms, limit.eager_max]
            for name, limit in zip(outputs, limits, strict=True)
        },
        "numbers": {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)},
        "keys": found.keys,
        "initial": _plain(loaded.arguments()),
    }
    _leave(header, listed)


def _results(path: Path, job: dict[str, Any]) -> None:
    """Inputs and weights for several seeds, and the exact results, without what errors may be."""
    import torch  # noqa: PLC0415

    from cuda_l2.kernelbench import foreign  # noqa: PLC0415
    from cuda_l2.kernelbench.file import Loaded  # noqa: PLC0415
    from cuda_l2.tasks.tolerance import widened  # noqa: PLC0415
    from cuda_l2.tasks.values import Distribution  # noqa: PLC0415

    sizes, distribution = job["sizes"], Distribution(job["distribution"]) if job["distribution"] else None
    loaded = Loaded(path, sizes)
    listed: list[tuple[Any, str, Any]] = []
    for index, seed in enumerate(job["seeds"]):
        given = (loaded, job["name"], job["revision"], sizes, seed, distribution)
        found = foreign.reference(*given, device=job["device"])
        values = {t.name: torch.as_tensor(value) for t, value in zip(found.task.inputs, found.inputs, strict=True)}
        listed += [(index, name, tensor) for name, tensor in (values | found.tensors).items()]
        with torch.no_grad():
            exact = found.function(**widened(found.tensors))
        listed += [(index, t.name, tensor) for t, tensor in zip(found.task.outputs, exact, strict=True)]
    _leave({}, listed)


def _inputs(path: Path, job: dict[str, Any]) -> None:
    """The file's own inputs for several seeds, without running its module."""
    import torch  # noqa: PLC0415

    from cuda_l2.kernelbench import foreign  # noqa: PLC0415
    from cuda_l2.kernelbench.file import Loaded  # noqa: PLC0415
    from cuda_l2.tasks.values import Distribution  # noqa: PLC0415

    loaded, distribution = (
        Loaded(path, job["sizes"]),
        Distribution(job["distribution"]) if job["distribution"] else None,
    )
    names = foreign.parameter_names(loaded.model(0), len(loaded.inputs(0)))
    listed = [
        (index, name, value)
        for index, seed in enumerate(job["seeds"])
        for name, value in zip(names, loaded.inputs(seed + 1, distribution), strict=True)
        if isinstance(value, torch.Tensor)
    ]
    _leave({}, listed)


def _leave(header: dict[str, Any], listed: list[tuple[Any, str, Any]]) -> None:
    """A header that names the tensors, and their bytes. listed: two words each tensor is known by, and the tensor."""
    import torch  # noqa: PLC0415

    with Path(TENSORS).open("wb") as file:
        for _, _, tensor in listed:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            file.write(data)  # as it lies there: tensors may be gigabytes
            file.write(bytes(-data.size % LINE))
    tensors = [(role, name, str(t.dtype).removeprefix("torch."), list(t.shape)) for role, name, t in listed]
    Path(RESULT).write_text(json.dumps(header | {"tensors": tensors}))


def _plain(value: Any) -> Any:
    """A constructor's arguments as data; None where they are none."""
    from cuda_l2.kernelbench.arguments import encode  # noqa: PLC0415

    try:
        return encode(value)
    except (ValueError, RecursionError):
        return None


if __name__ == "__main__":
    main()
