"""A process that has torch loaded and no file of others, from which sandboxed processes are forked.

Loading torch takes seconds, a fork some 20 ms. `template_main.py` forks, and has the child join a sandbox that was
started for it alone. Before the child runs anything, its state is compared with that of the sandbox's first process,
from outside: namespaces, root, credentials, limits, label, control group and descriptors. Where any differs, or the
system does not let processes join a sandbox, the caller starts its program in the sandbox itself.

The template is executed from a sealed copy of Python. A process that joins a sandbox brings the file that it executes
along, and would have a way to write that of the system, past the sandbox's read-only mounts.
"""

import atexit
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_l2.kernelbench import template_main
from cuda_l2.system import sandbox
from cuda_l2.system.closing import Closing

START_TIMEOUT_S = 120.0
MOST_ANSWER_BYTES = 1 << 16
NOBODY = 65534
PROGRAMS = "cuda_l2.kernelbench.reference_server", "cuda_l2.kernelbench.runner"
"""What a template has loaded."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
CREDENTIALS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
"""Lines of a process's status that are to be those of its sandbox."""
BASE = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "CCACHE_DISABLE": "1"}
"""Variables of a sandbox's commands, as `sandbox.start` has them."""


class Forked:
    """A process that was forked into a sandbox.

    pid: of the first process of its tree, which leads a process group. connection: to its program.
    """

    def __init__(self, template: "Template", pid: int, connection: socket.socket) -> None:
        self._template, self.pid, self.connection = template, pid, connection

    def wait(self) -> None:
        """Return when its first process, which was killed, has ended: its number may be another's from here on."""
        if self.pid in self._template.running:
            self._template.reap(self.pid)


class Template(Closing):
    """One process, of some 200 MiB. OSError or ValueError where it does not start, or was lost.

    command: runs `template_main`, with the programs to load.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.running: set[int] = set()
        self._touched = 0
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # a request comes as a whole
        with theirs, _sealed(Path(sys.executable).resolve()) as executable:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                executable=f"/proc/self/fd/{executable}",
                env={**BASE, **environment},
                pass_fds=(theirs.fileno(), executable),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        try:
            self._answer()
            self._touched = self._changed_ns()
        except BaseException:
            self.close()
            raise

    def _changed_ns(self) -> int:
        """When the mode, times or attributes of the file that it executes were changed last."""
        return os.stat(f"/proc/{self._process.pid}/exe").st_ctime_ns  # noqa: PTH116

    @property
    def clean(self) -> bool:
        """Whether no child has left anything on that file, which all children share."""
        try:
            return self._changed_ns() == self._touched
        except OSError:  # it is lost, which the next request finds
            return True

    def fork(
        self,
        sandboxed: Sequence[str],
        folder: Path,
        program: str,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        output: int,
        descriptors: Sequence[int],
    ) -> Forked | None:
        """A child in a new sandbox that runs a program, a socket's descriptor its first argument; None where it is
        not wholly inside.

        sandboxed: `template_main.HOLDER` as the sandbox's command. output: descriptor to which it prints. descriptors:
        others that it has, by their numbers.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = [theirs.fileno(), *descriptors]
            request = {
                "sandbox": list(sandboxed),
                "sandbox_environment": BASE,
                "folder": str(folder),
                "environment": {**BASE, **environment},
                "program": program,
                "arguments": [str(theirs.fileno()), *arguments],
                "descriptors": numbers,
            }
            try:
                with self._lock:
                    answer = self._ask(request, [theirs.fileno(), output, *descriptors])
            except (OSError, ValueError):  # the template is lost
                answer = {}
        if "keeper" not in answer:
            ours.close()
            return None
        forked = Forked(self, answer["keeper"], ours)
        self.running.add(forked.pid)
        try:
            if self._is_inside(answer, ours, {0, 1, 2, *numbers}):
                ours.sendall(template_main.GO)
                return forked
        except OSError:  # it ended meanwhile, or does not show its state
            pass
        kill(forked.pid)
        forked.wait()
        ours.close()
        return None

    def _is_inside(self, answer: Mapping[str, Any], ours: socket.socket, descriptors: set[int]) -> bool:
        """Whether a child is prepared, and as it should be."""
        if "child" not in answer:
            return False
        ours.settimeout(START_TIMEOUT_S)
        prepared = ours.recv(1) == template_main.PREPARED
        return prepared and not differences(answer["child"], answer["holder"], descriptors)

    def reap(self, pid: int) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # a template that was lost has no children
            self._ask({"reap": pid})
        self.running.discard(pid)

    def forget(self) -> None:
        """In a forked process: the template is another's to ask and to end."""
        self._connection.close()

    def close(self) -> None:
        self._connection.close()  # it ends then, and with it all that it forked
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(START_TIMEOUT_S)
        self._process.kill()
        self._process.wait()

    def _ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """The answer to a request. Where none comes the template ends: a late one would be taken for another's."""
        try:
            return self._asked(message, descriptors)
        except BaseException:
            self._connection.close()
            raise

    def _asked(self, message: Mapping[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
        socket.send_fds(self._connection, [json.dumps(message).encode()], descriptors)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        answer = json.loads(sandbox.receive_line(self._connection, START_TIMEOUT_S, MOST_ANSWER_BYTES))
        assert isinstance(answer, dict)
        return answer


@contextlib.contextmanager
def _sealed(path: Path) -> Iterator[int]:
    """A copy of a program in memory that nobody can change."""
    file = os.memfd_create(path.name, os.MFD_ALLOW_SEALING)
    try:
        with open(file, "wb", closefd=False) as copy:
            copy.write(path.read_bytes())
        os.fchmod(file, 0o555)
        if os.geteuid() == 0:  # else its children own it, and may change its times and attributes
            os.fchown(file, NOBODY, NOBODY)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        yield file
    finally:
        os.close(file)


def kill(pid: int) -> None:
    """End every process of a sandbox whose first process this is."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def differences(child: int, inside: int, descriptors: set[int]) -> list[str]:
    """What of a process is not as it is for the one that a sandbox started. descriptors: all that it may have."""
    ours, theirs = _state(child), _state(inside)
    found = [name for name, value in theirs.items() if ours[name] != value]
    held = {int(name) for name in os.listdir(f"/proc/{child}/fd")}  # noqa: PTH208
    maps = [line.split()[1] for line in Path(f"/proc/{child}/maps").read_text().splitlines()]
    shared = any("w" in rights and "s" in rights for rights in maps)
    return [*found, *(["descriptors"] if held != descriptors else []), *(["shared memory"] if shared else [])]


def _state(pid: int) -> dict[str, object]:
    folder = Path(f"/proc/{pid}")
    lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
    status = {name: value.split() for name, _, value in lines}
    found: dict[str, object] = {name: status.get(name) for name in CREDENTIALS}
    found |= {name: str((folder / "ns" / name).readlink()) for name in template_main.NAMESPACES}
    root = (folder / "root").stat()
    found |= {"root": (root.st_dev, root.st_ino), "limits": (folder / "limits").read_text()}
    found["cgroup"] = (folder / "cgroup").read_text()
    try:
        found["label"] = (folder / "attr" / "current").read_text()
    except OSError:  # no security module
        found["label"] = ""
    return found


_templates: list[Template] = []
"""The last one serves. A child has changed the file of those before it: they end with the last of their children."""
_gave_up = False
_lock = threading.Lock()


def the_template(command: Sequence[str], environment: Mapping[str, str]) -> Template | None:
    """The one that serves, started on first use; None where that fails. command: runs `template_main`."""
    with _lock:
        for left in [known for known in _templates[:-1] if not known.running]:
            left.close()
            _templates.remove(left)
        if not _gave_up and not (_templates and _templates[-1].clean):
            try:
                _templates.append(Template([*command, *PROGRAMS], environment))
            except (OSError, ValueError):
                _give_up()
        return None if _gave_up else _templates[-1]


def give_up() -> None:
    """Fork no other process."""
    with _lock:
        _give_up()


def _give_up() -> None:
    global _gave_up  # noqa: PLW0603 - a system that lets no process join a sandbox goes on not to
    _gave_up = True


@atexit.register
def _close_all() -> None:
    for known in _templates:
        known.close()


def _forget_all() -> None:
    """In a forked process: the templates are another's, and end with it."""
    global _lock  # noqa: PLW0603 - another thread may have held it at the fork
    _lock = threading.Lock()
    for known in _templates:
        known.forget()
    _templates.clear()


os.register_at_fork(after_in_child=_forget_all)
