"""The program inside the sandbox that runs one of KernelBench's files, on CPUs in a child of its own.

On a GPU in this process: one that has CUDA cannot give it to a child, and each would take seconds to set it up.

Started by opened.py for every file, in a folder with `task.py`. It reads jobs, a JSON line each, from its socket
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

LIBRARIES_BYTES = 8 << 30
"""Address space that torch's libraries and threads take beside what they work on."""


def main() -> None:
    """Arguments: the socket's descriptor, the module search path as JSON, the device."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = json.loads(sys.argv[2])
    os.environ["USER"] = "sandbox"  # torch asks for a name, and there is no /etc/passwd
    os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin after their work would slow what else runs
    try:
        import cuda_l2.kernelbench.reference_jobs  # noqa: F401, PLC0415 - so that a forked child has it
        from cuda_l2.kernelbench.reference import warm_up  # noqa: PLC0415
        from cuda_l2.tasks.warm import set_full_precision  # noqa: PLC0415

        warm_up()
        if sys.argv[3] != "cpu":
            set_full_precision()
        answer: dict[str, Any] = {"ready": True}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells the user
        answer = {"error": f"{type(error).__name__}: {error}"}
    _send(connection, answer)
    from cuda_l2.build.compile_server import in_child  # noqa: PLC0415
    from cuda_l2.kernelbench.answer_files import ERROR, RESULT, TENSORS  # noqa: PLC0415

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
        from cuda_l2.kernelbench.reference_jobs import do  # noqa: PLC0415 - where the search path is set

        do(job)
        return 0
    except BaseException as error:  # noqa: BLE001 - other people's Python, which may ask to exit too
        from cuda_l2.kernelbench.answer_files import ERROR  # noqa: PLC0415
        from cuda_l2.system.text import line_of  # noqa: PLC0415

        Path(ERROR).write_text(line_of(error), errors="replace")
        return 1


if __name__ == "__main__":
    main()
