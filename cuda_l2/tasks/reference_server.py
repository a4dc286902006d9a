"""The program inside the sandbox that runs one of KernelBench's files, in a child of its own.

Started by kernelbench.py for every run, in a folder with `task.py`. It reads one job, a JSON line, from its socket and
answers with one line. The child leaves `result.json` in the folder, and `tensors` where a case was asked for. What a
file does to its process (memory, time, a crash) it does to the child. Ends when the socket closes, and its child too.
"""

import json
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

TASK, RESULT, TENSORS = "task.py", "result.json", "tensors"
LIBRARIES_BYTES = 8 << 30
"""Address space that torch's libraries and threads take beside what they work on."""


def main() -> None:
    """Arguments: the socket's descriptor, the module search path as JSON."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = json.loads(sys.argv[2])
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin after their work would slow what else runs
    try:
        from cuda_l2.tasks import foreign  # noqa: PLC0415 - where the search path is set

        foreign.warm_up()
        answer: dict[str, Any] = {"ready": True}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells the user
        answer = {"error": f"{type(error).__name__}: {error}"}
    _send(connection, answer)
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part:
            return
        line += part
    job = json.loads(line)
    most = job["memory_bytes"]
    limits = {
        resource.RLIMIT_AS: most + LIBRARIES_BYTES,
        resource.RLIMIT_FSIZE: most,
        resource.RLIMIT_CORE: 0,
    }
    from cuda_l2.build.compile_server import in_child  # noqa: PLC0415

    _send(connection, {"status": in_child(connection, limits, lambda: _do(job))})


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _do(job: dict[str, Any]) -> int:
    from cuda_l2.records import to_json  # noqa: PLC0415
    from cuda_l2.tasks import foreign  # noqa: PLC0415
    from cuda_l2.tasks.examined import Examined, Readiness  # noqa: PLC0415
    from cuda_l2.tasks.foreign_file import Refused  # noqa: PLC0415

    path, name, revision = Path(TASK).resolve(), job["name"], job["revision"]
    try:
        if job["action"] == "case":
            _case(path, job)
            return 0
        examined = foreign.examine(
            *(path, name, revision),
            sizes=job["sizes"],
            seed=job["seed"],
            memory_bytes=job["memory_bytes"],
            budget_bytes=job["budget_bytes"],
            budget_flops=job["budget_flops"],
            parts=job["parts"],
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

    from cuda_l2.records import to_json  # noqa: PLC0415
    from cuda_l2.tasks import foreign  # noqa: PLC0415
    from cuda_l2.tasks.foreign_file import Loaded  # noqa: PLC0415
    from cuda_l2.tasks.values import Distribution  # noqa: PLC0415

    sizes, distribution = job["sizes"], Distribution(job["distribution"]) if job["distribution"] else None
    loaded = Loaded(path, sizes)
    found = foreign.reference(loaded, job["name"], job["revision"], sizes, job["seed"], distribution)
    limits = found.bounds()
    outputs = [tensor.name for tensor in found.task.outputs]
    given = zip(found.task.inputs, found.inputs, strict=True)
    tensors = {t.name: torch.as_tensor(value) for t, value in given} | found.tensors
    listed = [("given", name, tensor) for name, tensor in tensors.items()]
    for name, limit in zip(outputs, limits, strict=True):
        listed += [("exact", name, limit.exact), ("free", name, limit.free)]
    header = {
        "task": json.loads(to_json(found.task)),
        "tensors": [(role, name, str(t.dtype).removeprefix("torch."), list(t.shape)) for role, name, t in listed],
        "bounds": {
            name: [limit.rms_allowed, limit.max_allowed, limit.eager_rms, limit.eager_max]
            for name, limit in zip(outputs, limits, strict=True)
        },
    }
    with Path(TENSORS).open("wb") as file:
        for _, _, tensor in listed:
            file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    Path(RESULT).write_text(json.dumps(header))


if __name__ == "__main__":
    main()
