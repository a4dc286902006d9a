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

import chance
import few_kernels
import kept_baselines
import scripted_times

TIMEOUT_S = 1800.0


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """`cuda-l2 ARGUMENTS` with further variables in its environment."""
    with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
        files = {"input": os.devnull, "output": output.name, "errors": errors.name}
        status = run_over(files, *arguments, cwd=cwd, **environment)
        said = (Path(file.name).read_text() for file in (output, errors))
        return subprocess.CompletedProcess(["cuda-l2", *arguments], status, *said)


def run_over(files: dict[str, str], *arguments: str, cwd: Path | None = None, **environment: str) -> int:
    """The same over files, or named pipes, for its input, output and errors; its status."""
    environment = {**os.environ, **environment}
    return _ask(
        {"arguments": ["cuda-l2", *arguments], "cwd": str(cwd or Path.cwd()), "environment": environment, **files}
    )


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
    import cuda_l2.commands._app  # noqa: PLC0415
    import cuda_l2.optimizer  # noqa: PLC0415
    import cuda_l2.runs.sweep  # noqa: PLC0415 - what most commands load
    import cuda_l2.store.sqlite  # noqa: F401, PLC0415
    from cuda_l2 import cli  # noqa: PLC0415

    chance.install(setattr)
    scripted_times.install(setattr)
    kept_baselines.install(setattr)
    few_kernels.install(setattr)
    kept_baselines.await_start()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            job = json.loads(line)
            for descriptor, name in enumerate(("input", "output", "errors")):
                opened = os.open(job[name], os.O_WRONLY if descriptor else os.O_RDONLY)
                os.dup2(opened, descriptor)
                os.close(opened)
            os.chdir(job["cwd"])
            os.environ.clear()
            os.environ.update(job["environment"])
            chance.take_up()
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
