"""The program inside the sandbox that compiles CUDA candidates: loads NVRTC once and forks a child for each job.

Started by cuda_compiler.py as a file of its own, with nothing of this package. It reads one JSON line a job from its
socket, does one job at a time and answers each with one line. A job is a folder with `candidate.cu`; the child leaves
`kernel.cubin`, `kernel.ptx` and `log` in it. What a source does to the compiler (crash, memory, time) it does to the
child, and the next job finds the server as it was. Ends when the socket closes, and its child with it.
"""

import io
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE, CUBIN, PTX, LOG = "candidate.cu", "kernel.cubin", "kernel.ptx", "log"
WARM_UP = 'extern "C" __global__ void warm_up() {}'


def main() -> None:
    """Arguments: the socket's descriptor, the module search path as JSON, a CUDA toolkit's folder."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = json.loads(sys.argv[2])
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of numpy, which cuda.core imports; a forked process may have one thread
    os.environ["CUDA_HOME"] = sys.argv[3]
    lines = connection.makefile("r", encoding="utf-8")
    answer: dict[str, Any]
    try:
        answer = {"ready": _load()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells the user
        answer = {"error": f"{type(error).__name__}: {error}"}
    _send(connection, answer)
    for line in lines:
        _send(connection, _run(json.loads(line), connection))


def _send(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _load() -> str:
    """Load NVRTC by compiling something; its PTX, which names the exact version."""
    return _nvrtc(WARM_UP, {"arch": "sm_80"})[1]


def _run(job: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
    limits = {getattr(resource, name): value for name, value in job["limits"].items()}
    return {"status": in_child(connection, limits, lambda: _compile(job))}


def in_child(connection: socket.socket, limits: dict[int, int], work: Callable[[], int]) -> int:
    """Work in a forked child under resource limits: its exit status, negative for a signal.

    connection: to the parent, which says nothing meanwhile; the child has it not. If it closes, this process group
    ends.
    """
    ended, held = os.pipe()  # the child's end closes when the child is gone
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(connection.detach())
            os.close(ended)
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            for limit, value in limits.items():
                # of processor time SIGXCPU at the limit; at the hard one SIGKILL, which does not say why
                resource.setrlimit(limit, (value, value + (limit == resource.RLIMIT_CPU)))
            status = work()
        except BaseException as error:  # noqa: BLE001 - this is the child's end, also where memory is short
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(status)
    os.close(held)
    if connection.fileno() in select.select([ended, connection.fileno()], [], [])[0]:
        os.killpg(0, signal.SIGKILL)  # the parent is gone, for it says nothing else now: so are we
    os.close(ended)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _compile(job: dict[str, Any]) -> int:
    os.chdir(str(job["folder"]))
    try:
        cubin, ptx, log_text = _nvrtc(Path(SOURCE).read_text(), job["options"])
    except Exception as error:  # noqa: BLE001 - the compiler's own error among others, with its log as text
        text = str(error).rstrip("\0 \n")
        Path(LOG).write_text(text.split("compilation log:\n", 1)[-1].strip())
        return 1
    Path(CUBIN).write_bytes(cubin)
    Path(PTX).write_text(ptx)
    Path(LOG).write_text(log_text)
    return 0


def _nvrtc(source: str, options: dict[str, Any]) -> tuple[bytes, str, str]:
    """Cubin, PTX and log of a source; raises what cuda.core raises, the log in its text."""
    from cuda.bindings import nvrtc  # noqa: PLC0415 - only where the search path is set
    from cuda.core import Program, ProgramOptions  # noqa: PLC0415

    log = io.StringIO()
    program = Program(source, "c++", ProgramOptions(name=SOURCE, **options))
    cubin = bytes(program.compile("cubin", logs=log).code)
    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program.handle, ptx)
    return cubin, ptx.rstrip(b"\0 ").decode(errors="replace"), log.getvalue().rstrip("\0 \n")


if __name__ == "__main__":
    main()
