"""NVRTC on one CUDA source at a time: finds it and its headers, runs it through the compile server.

A server is one sandboxed process that has NVRTC loaded (compile_server.py), so that a small kernel costs its compile
time and no start of Python. It compiles one source at a time; as many servers run as sources are compiled at once, and
they stay for the next ones. Each has a sandbox of its own: a source that breaks one costs no other. A server dies with
this process.
"""

import atexit
import concurrent.futures
import contextlib
import errno
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_l2.build import compile_server
from cuda_l2.build.compile_server import CUBIN, LOG, PTX, SOURCE
from cuda_l2.machine.cuda import toolkit
from cuda_l2.records import BuildStatus
from cuda_l2.system import paths, sandbox, scratch
from cuda_l2.system.errors import UserError

CPU_S, CUTLASS_CPU_S = 30, 90
"""Limits of the processor time of a compilation; by the clock `PATIENCE` times as much, since machines are busy."""
PATIENCE = 10
MEMORY_BYTES, CUTLASS_MEMORY_BYTES = 4 << 30, 8 << 30
FILE_BYTES = 64 << 20
START_TIMEOUT_S = 120.0
MAX_LOG_BYTES = 4 << 20
NVRTC_HEADERS = Path(__file__).with_name("nvrtc_headers")
INSTALL = "pip install 'cuda-l2[cuda]', or set CUDA_HOME to a CUDA toolkit of version 13"


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What compiles, and where its headers lie."""

    version: str  # NVRTC's, as in 13.0.88
    nvdisasm: Path
    headers: tuple[Path, ...]
    identity: str  # changes with any of them

    def __str__(self) -> str:
        return f"nvrtc {self.version}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of one source; cubin and PTX where the status is built."""

    status: BuildStatus
    reason: str = ""
    log: str = ""
    cubin: bytes = b""
    ptx: str = ""
    waiting: tuple[str, ...] = ()  # kernels whose blocks wait for one another, as their PTX says
    repeatable: bool = True  # false where the machine, not the source, may be the cause
    seconds: float = 0.0


@functools.cache
def toolchain() -> Toolchain:
    """What is installed here, or a UserError that says how to get it."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        raise UserError("compiling CUDA kernels needs the package cuda-core: pip install 'cuda-l2[cuda]'")
    headers = (NVRTC_HEADERS, *_toolkit_headers())
    flags = json.dumps(_nvrtc_options("", list(headers)))
    with _server() as server:
        said = server.compiler
    version = re.search(r"\bV(\d+\.\d+\.\d+)", said)
    nvdisasm = _utility("nvdisasm")
    if not nvdisasm:
        raise UserError(f"nvdisasm was not found: {INSTALL}")
    marks = [nvdisasm, *sorted(NVRTC_HEADERS.iterdir())]
    marks += [folder / "cuda.h" for folder in headers if (folder / "cuda.h").exists()]
    return Toolchain(
        version=version.group(1) if version else "unknown",
        nvdisasm=nvdisasm,
        headers=headers,
        identity="\n".join(["nvrtc", said, flags, *map(_stamp, marks)]),
    )


@functools.cache
def cutlass() -> tuple[Path, str] | None:
    """The folder that holds cute/ and cutlass/, and what changes with its version; None where it is not installed."""
    spec = importlib.util.find_spec("cutlass_library")
    roots: Iterable[str] = spec.submodule_search_locations or () if spec else ()
    for root in roots:
        folder = Path(root) / "source" / "include"
        if (folder / "cute").is_dir():
            return folder, _stamp(folder / "cutlass" / "version.h")
    return None


def _stamp(path: Path) -> str:
    return f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"


def _toolkit_headers() -> list[Path]:
    """Where NVRTC looks. From CUDA 13 on some ask for <cccl/...> too, and cccl may lie apart from the rest."""
    cccl, cudart = _headers("cccl"), _headers("cudart")
    return list(dict.fromkeys([cccl, cudart, *([cccl.parent] if cccl.name == "cccl" else [])]))


def _headers(library: str) -> Path:
    found = toolkit.headers(library)
    if not found:
        raise UserError(f"the CUDA headers ({library}) were not found: {INSTALL}")
    return found


def _utility(name: str) -> Path | None:
    found = toolkit.program(name)
    return found.resolve() if found else None


def compile_source(source: str, arch: str, tools: Toolchain, *, with_cutlass: bool) -> Compiled:
    """Compile one source for an architecture, as in sm_90a. with_cutlass: it includes CuTe or CUTLASS."""
    headers = list(tools.headers)
    if with_cutlass:
        found = cutlass()
        if not found:
            reason = "includes CuTe or CUTLASS, whose headers are not installed: pip install nvidia-cutlass"
            return Compiled(BuildStatus.FAILED, reason, repeatable=False)
        headers.append(found[0])
    cpu_s = CUTLASS_CPU_S if with_cutlass else CPU_S
    memory_bytes = CUTLASS_MEMORY_BYTES if with_cutlass else MEMORY_BYTES
    limits = {"RLIMIT_AS": memory_bytes, "RLIMIT_CPU": cpu_s, "RLIMIT_FSIZE": FILE_BYTES, "RLIMIT_CORE": 0}
    job = {"limits": limits, "options": _nvrtc_options(arch, headers)}
    for _ in range(2):
        try:
            with _server() as server:
                return server.compile(source, job, PATIENCE * cpu_s)
        except ServerEnded:
            continue  # for whatever reason: one more try, on another
    return Compiled(BuildStatus.FAILED, "the compile server ended twice on this source", repeatable=False)


def _nvrtc_options(arch: str, headers: list[Path]) -> dict[str, object]:
    return {
        "arch": arch,
        "std": "c++17",
        "define_macro": ["NDEBUG"],
        "device_as_default_execution_space": True,
        "include_path": [str(path) for path in headers],
        "ptxas_options": ["-v"],
    }


class ServerEnded(Exception):
    """The server is gone, and the job with it."""


class Server:
    """One compile server; compiles one source at a time."""

    def __init__(self) -> None:
        self.folder = _make_folder()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection, theirs = socket.socketpair()
        search = json.dumps([str(Path(path).absolute()) for path in sys.path if path])
        arguments = [
            sys.executable,
            "-I",
            str(Path(compile_server.__file__)),
            str(theirs.fileno()),
            search,
            str(_nvrtc()),
        ]
        command = sandbox.wrap(arguments, self.folder, reads=_readable())
        try:
            with theirs, (self.folder / "server.log").open("wb") as log:
                # a sandbox may die with the thread that started it (PR_SET_PDEATHSIG), so one that stays starts it
                start = _starter().submit(
                    sandbox.start, command, pass_fds=(theirs.fileno(),), stdout=log, stderr=log, cwd=self.folder
                )
                self._process = start.result()
            try:
                answer = self._answer(START_TIMEOUT_S)
            except (OSError, ValueError):
                said = (self.folder / "server.log").read_text(errors="replace").strip()
                answer = {"error": said[-500:] or "no answer"}
            if "error" in answer:
                raise UserError(f"NVRTC does not start: {answer['error']}; {INSTALL}")
        except BaseException:
            self.close()
            raise
        self.compiler = str(answer["ready"])

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None and self.folder.is_dir()

    def compile(self, source: str, job: dict[str, Any], timeout_s: float) -> Compiled:
        """Do one job; ServerEnded where the server is lost. A job out of time takes the server with it."""
        start = time.perf_counter()
        folder = self.folder / "job"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / SOURCE).write_text(source)
            self._connection.sendall(json.dumps({**job, "folder": str(folder.resolve())}).encode() + b"\n")
            status = self._answer(timeout_s)["status"]
        except TimeoutError:
            self.close()
            reason = f"the compiler did not finish within {timeout_s:.0f} s"
            return Compiled(BuildStatus.TIMED_OUT, reason, repeatable=False)
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            raise ServerEnded from None
        return _result(folder, status, time.perf_counter() - start)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(sandbox.receive_line(self._connection, timeout_s, MAX_LOG_BYTES))
        return answer

    def close(self) -> None:
        """End the server and all it runs."""
        process, self._process = self._process, None
        if process:
            sandbox.kill(process)
            process.wait()
        self._connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _make_folder() -> Path:
    """A server's own folder under the cache, named for this process. What dead processes left goes first."""
    parent = paths.cache_dir() / "servers"
    with scratch.writing():
        parent.mkdir(parents=True, exist_ok=True)
        for folder in parent.iterdir():
            owner = folder.name.split("-")[0]
            if owner.isdigit() and not Path("/proc", owner).exists():
                shutil.rmtree(folder, ignore_errors=True)
        return Path(tempfile.mkdtemp(dir=parent, prefix=f"{os.getpid()}-"))


def _result(folder: Path, status: int, seconds: float) -> Compiled:
    log = (sandbox.read_left(folder / LOG, MAX_LOG_BYTES) or b"").decode(errors="replace")
    if status == 0:
        cubin, text = (sandbox.read_left(folder / name, FILE_BYTES) or b"" for name in (CUBIN, PTX))
        if cubin and text and len(log) < MAX_LOG_BYTES:
            return Compiled(BuildStatus.BUILT, "", log, cubin, text.decode(errors="replace"), seconds=seconds)
        return Compiled(BuildStatus.FAILED, "the compiler wrote nothing, or too much", log, seconds=seconds)
    if shutil.disk_usage(folder).free < FILE_BYTES:  # not a property of the source
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if status == -signal.SIGXCPU:
        return Compiled(BuildStatus.TIMED_OUT, "the compiler used all its processor time", log, repeatable=False)
    repeatable = status != -signal.SIGKILL
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        reason = f"the compiler crashed or ran out of memory ({name})"
    else:
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"error|fatal", line, re.IGNORECASE)] or lines
        reason = errors[0][:300] if errors else f"the compiler ran out of memory, or ended with status {status}"
    return Compiled(BuildStatus.FAILED, reason, log, repeatable=repeatable, seconds=seconds)


_idle: list[Server] = []
_lock = threading.Lock()


@contextlib.contextmanager
def _server() -> Iterator[Server]:
    """A server of one's own for a while: one that waits, or a new one."""
    server: Server | None = None
    with _lock:
        while _idle and server is None:
            server = _idle.pop()
            if not server.alive:
                server.close()
                server = None
    server = server or Server()
    try:
        yield server
    except BaseException:  # a job may be left in it
        server.close()
        raise
    if server.alive:
        with _lock:
            _idle.append(server)


def close_servers() -> None:
    """End the servers that wait. Later compilations start new ones."""
    with _lock:
        while _idle:
            _idle.pop().close()


atexit.register(close_servers)


@functools.cache
def _starter() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile-server-starter")


@functools.cache
def _nvrtc() -> Path:
    """NVRTC's library. Finding it loads it here too, which costs little: nothing here calls it."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib  # noqa: PLC0415

    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except DynamicLibNotFoundError:
        path = None
    if not path:
        raise UserError(f"NVRTC was not found: {INSTALL}")
    return Path(path)


@functools.cache
def _readable() -> list[Path]:
    """What a server must read beside the system's folders: Python, its packages, NVRTC, headers, a toolkit."""
    folders = [Path(compile_server.__file__).parent, _nvrtc().parent]
    with contextlib.suppress(UserError):  # said where the toolchain is asked for
        folders += _toolkit_headers()
    found = cutlass()
    folders += [found[0]] if found else []
    if nvcc := _utility("nvcc"):
        folders.append(nvcc.parent.parent)
    return sandbox.python_folders(*folders)
