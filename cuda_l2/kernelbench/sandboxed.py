"""A sandboxed process that runs somebody else's Python: a folder of its own, lines of JSON, gone with all it started.

The program inside is a module of ours (`reference_server`, `runner`), but what it runs shares its process, so
nothing that it says is believed: answers are data. To load torch takes it two to three seconds.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu.target import usable_cores
from cuda_l2.measure import inductor
from cuda_l2.records import VerdictStatus
from cuda_l2.system import paths, process_tree, sandbox, scratch
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError

START_TIMEOUT_S = 120.0
GONE_TIMEOUT_S = 60.0
MAX_ANSWER_BYTES = 8 << 20
BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from cuda_l2.system import loading
loading.main()
"""
FOLDERS = {
    **{"HOME": ".", "TMPDIR": "temporary", "TORCH_EXTENSIONS_DIR": "extensions"},
    **{"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"},
}
"""Folders in that of the process, by the variables that name them. torch asks for a user's name, and there is no
/etc/passwd."""
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""glibc keeps small blocks that were freed in a cache for each thread, and so long what was freed around them does not
become one: what is left of PyTorch's aligned blocks lay between a module's results, which moved about from call to call
where checks of other sizes had come before, and it took 1.2 times as long as itself.
"""
LATE = "did not answer in time"
GONE = "its process ended, or said what cannot be read"


class SandboxedPython(Closing):
    """One sandboxed Python with torch loaded. A context manager.

    program: name of the module that it runs, with a socket's descriptor and `arguments` as arguments; its first line is
    `{"ready": ...}` or `{"error": ...}`. files: what lies in its folder, by name. memory_bytes: what all its
    processes together may hold, and these may be few hundred then; 0 leaves both open. spins: threads do so between
    parallel regions, each on a core of its own; else they sleep. UserError where there is no sandbox, or the program
    does not start.
    """

    def __init__(
        self,
        program: str,
        files: Mapping[str, bytes],
        *,
        memory_bytes: int = 0,
        arguments: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        devices: Sequence[Path] = (),
        spins: bool = False,
    ) -> None:
        if sandbox.kind() is sandbox.Kind.LIMITS:
            raise UserError("there is no sandbox to run other people's Python in; apt install bubblewrap")
        self._watch: process_tree.Watch | None = None
        self._ended = False
        self.folder = scratch.make_folder().resolve()
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
        for name in FOLDERS.values():
            (self.folder / name).mkdir(exist_ok=True)
        self._connection, theirs = socket.socketpair()
        try:
            libraries = sandbox.gpu_libraries() if devices else None
            variables = environment(libraries, spins=spins)
            variables |= {variable: str(self.folder / name) for variable, name in FOLDERS.items()}
            command = ["/usr/bin/env", *(f"{name}={value}" for name, value in variables.items())]
            command += [*python(program), str(theirs.fileno()), *arguments]
            with tempfile.TemporaryFile() as log:
                with theirs:
                    self._process = sandbox.start(
                        sandbox.wrap(command, self.folder, reads=readable(libraries or []), devices=devices, proc=True),
                        pass_fds=(theirs.fileno(), *pass_fds),
                        stdout=log,
                        stderr=log,
                        cwd=self.folder,
                    )
                if memory_bytes:
                    self._watch = process_tree.Watch(self.pid, memory_bytes, lambda: sandbox.kill(self._process))
                try:
                    answer = self.answer(START_TIMEOUT_S)
                except Fault:
                    log.seek(0)
                    said = log.read(sandbox.MAX_OUTPUT_BYTES).decode(errors="replace").strip()
                    answer = {"error": said[-300:] or "no answer"}
            if "error" in answer:
                raise UserError(f"the process for other people's Python does not start: {answer['error']}")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a line and read one; Fault where there is none."""
        self.send(message)
        return self.answer(timeout_s)

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._gone() from None

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next line that it says; Fault where it says none in time."""
        try:
            answer = json.loads(sandbox.receive_line(self._connection, timeout_s, MAX_ANSWER_BYTES))
        except TimeoutError:
            raise Fault(VerdictStatus.TIMED_OUT, LATE) from None
        except (OSError, ValueError, RecursionError):
            raise self._gone() from None
        if not isinstance(answer, dict):
            raise Fault(VerdictStatus.CRASHED, GONE)
        return answer

    def signal(self, timeout_s: float) -> bytes:
        """The next byte that it sends, empty where none comes in time; Fault where the process is gone."""
        self._connection.settimeout(timeout_s)
        try:
            said = self._connection.recv(1)
        except TimeoutError:
            return b""
        except OSError:
            said = b""
        if not said:
            raise self._gone()
        return said

    def close(self) -> None:
        """End it with every process of its namespace, and remove its folder."""
        if self._watch:
            self._watch.close()
        if hasattr(self, "_process") and not self._ended:
            self._ended = True
            held = process_tree.processes(self.pid)
            sandbox.kill(self._process)
            for pid in held:  # one may have left the group, and given up to end with its parent
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            process_tree.wait_gone(held, GONE_TIMEOUT_S)
        self._connection.close()
        scratch.remove(self.folder)

    def _gone(self) -> Fault:
        return Fault(VerdictStatus.CRASHED, (self._watch and self._watch.exceeded) or GONE)


def python(program: str) -> list[str]:
    """A command that runs a module with this process's search path, and nothing else of its environment."""
    search = json.dumps([str(Path(path).absolute()) for path in sys.path if path])
    return [sys.executable, "-IB", "-c", BOOT, search, program]


def environment(libraries: Sequence[str] | None, *, spins: bool) -> dict[str, str]:
    """Variables of every such process: compilers, settings of torch.compile, how OpenMP's threads wait.

    libraries: folders of the GPU driver's; None where the process uses no GPU.
    """
    threads = {"OMP_PROC_BIND": "close"} if spins else {"OMP_WAIT_POLICY": "passive"}
    threads |= {"MAX_JOBS": str(usable_cores()), "PYTHONDONTWRITEBYTECODE": "1"}
    compiler = shutil.which("nvcc")
    path = ["/usr/local/bin", "/usr/bin", "/bin"]
    if ninja := shutil.which("ninja"):
        path.insert(0, str(Path(ninja).parent))
    found = {"CUDA_HOME": str(Path(compiler).resolve().parents[1])} if compiler else {}
    if libraries is not None:
        found["LD_LIBRARY_PATH"] = ":".join(libraries)
        if libraries:
            found["TRITON_LIBCUDA_PATH"] = libraries[-1]
        path[:0] = [str(Path(compiler).parent)] if compiler else []
        if "CUDA_VISIBLE_DEVICES" in os.environ:  # the GPU that we use ourselves
            found["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    named = {"USER": "sandbox", "PATH": ":".join(dict.fromkeys(path))}
    return MALLOC | threads | found | inductor.environment() | named


def readable(libraries: Sequence[str]) -> list[Path]:
    """Folders that such a process must read beside the system's: Python, its packages, this package, CUDA."""
    compiler = shutil.which("nvcc")
    toolkit = [Path(compiler).resolve().parents[1]] if compiler else []
    driver = [Path(folder) for folder in libraries if not folder.startswith(("/usr", "/lib"))]
    return [*sandbox.python_folders(paths.PACKAGE, *toolkit), *driver]
