"""Runs `cuda-l2` in processes that have torch loaded already, so that a command starts in moments and not in seconds.

Each has a process, a folder, an environment, output and an exit status of its own, as one from a shell has, and is
forked from a process in which nothing but imports ever ran.
"""

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import kept_baselines
import scripted_times

TIMEOUT_S = 600.0


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """`cuda-l2 ARGUMENTS` with further variables in its environment."""
    with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
        job = {
            "arguments": ["cuda-l2", *arguments],
            "cwd": str(cwd or Path.cwd()),
            "environment": {**os.environ, **environment},
            "output": output.name,
            "errors": errors.name,
        }
        status = _ask(job)
        said = (Path(file.name).read_text() for file in (output, errors))
        return subprocess.CompletedProcess(job["arguments"], status, *said)


def _ask(job: dict[str, object]) -> int:
    server = _server()
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    ready, _, _ = select.select([server.stdout], [], [], TIMEOUT_S)
    if not ready:
        _end(server)
        raise subprocess.TimeoutExpired(str(job["arguments"]), TIMEOUT_S)
    return int(server.stdout.readline())


@functools.cache
def _server() -> "subprocess.Popen[str]":
    command = [sys.executable, __file__]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    atexit.register(_end, server)
    return server


def _end(server: "subprocess.Popen[str]") -> None:
    """With the command that it may be at."""
    _server.cache_clear()
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def serve() -> None:
    """Read jobs, a JSON line each, and answer each with its status.

    A child ends as a command does, but for taking its modules apart, which costs more than most commands.
    """
    import cuda_l2.optimizer  # noqa: PLC0415
    import cuda_l2.runs.sweep  # noqa: F401, PLC0415 - what most commands load
    from cuda_l2 import cli  # noqa: PLC0415

    scripted_times.install(setattr)
    kept_baselines.install(setattr)
    kept_baselines.await_start()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            job = json.loads(line)
            for descriptor, file in enumerate((os.devnull, job["output"], job["errors"])):
                os.dup2(os.open(file, os.O_RDWR), descriptor)
            os.chdir(job["cwd"])
            os.environ.clear()
            os.environ.update(job["environment"])
            sys.argv = job["arguments"]
            try:
                cli.main()
                status = 0
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:  # noqa: BLE001 - as the interpreter does
                sys.excepthook(*sys.exc_info())
                status = 1
            threading._shutdown()
            kept_baselines.leave()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
