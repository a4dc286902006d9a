"""Runs a command in a sandbox: it reads system libraries and one folder, writes that folder, reaches nothing else.

bubblewrap where present, else user namespaces through unshare and setpriv, else resource limits alone. All three run
in a process group of their own, so that one signal ends every process of the command: bubblewrap's, which has a session
of its own inside, dies with bubblewrap.
"""

import contextlib
import enum
import functools
import io
import os
import platform
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.system.errors import UserError
from cuda_l2.system.native import compiled

NAMESPACES = Path(__file__).with_name("namespaces.c")
LONGEST_S = 1e6
"""Wait for a process, at most: poll takes milliseconds of 31 bits."""
MAX_OUTPUT_BYTES = 100_000
"""Limit of a command's output that is kept."""
MOST_TASKS = 1024 + 16 * (os.cpu_count() or 1)
"""Processes and threads of one sandbox at a time, where the kernel limits them: thousands take minutes to end."""
_DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""With the thread that starts it, to be exact, as bubblewrap's --die-with-parent has it too."""
TRIAL_S = 120.0
"""Limit of a sandbox's first trial: a busy machine must not be given a weaker one."""
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives")

# Builds the same view as bubblewrap's with unshare's own privileges: an empty root, the system's folders
# read-only, the work folder writable. pivot_root then drops the old root. The command keeps no capability: with
# CAP_SYS_ADMIN it could mount the folders writable again. namespaces.c does the same in a fifth of the time.
_NAMESPACE_SCRIPT = """
set -e
IFS='
'
root=$1 work=$2 reads=$3 devices=$4 proc=$5 most=$6
shift 6
mount -t tmpfs -o size=16m,mode=755 tmpfs "$root"
for folder in $reads; do
    if [ -L "$folder" ]; then ln -s "$(readlink "$folder")" "$root$folder"
    elif [ -d "$folder" ]; then
        mkdir -p "$root$folder"
        mount --rbind "$folder" "$root$folder"
        mount -o remount,bind,ro "$root$folder"
    fi
done
mkdir -p "$root/dev" "$root/tmp" "$root$work"
for device in /dev/null /dev/urandom $devices; do
    mkdir -p "$root${device%/*}"
    touch "$root$device" && mount --bind "$device" "$root$device"
done
mount --bind "$work" "$root$work"
mkdir "$root/.old" "$root/proc"
mount -t proc proc "$root/proc" # umount looks there
limit="$root/proc/sys/kernel/pid_max"
if [ "$most" ] && (echo "$most" >"$limit") 2>/dev/null; then
    mount --bind "$limit" "$limit"
    mount -o remount,bind,ro "$limit"
fi
cd "$root"
pivot_root . .old
umount -l /.old
[ "$proc" ] || umount -R /proc
cd "$work"
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""
_SCRIPT = ("/bin/sh", "-c", _NAMESPACE_SCRIPT, "sandbox")


class Kind(enum.StrEnum):
    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "user namespaces"
    LIMITS = "resource limits only"


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one command; 0 leaves that one alone."""

    memory_bytes: int = 0
    cpu_seconds: int = 0
    """Limit of each process by itself, which SIGXCPU ends there."""
    file_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended; status is negative for a signal, None where it outran its time."""

    status: int | None
    output: str


@functools.cache
def kind() -> Kind:
    """The strongest sandbox that works here, found by trying each once."""
    with tempfile.TemporaryDirectory() as folder:
        for candidate in (Kind.BUBBLEWRAP, Kind.NAMESPACES):
            try:
                trial = subprocess.run(
                    wrap(["/bin/true"], Path(folder), using=candidate),
                    capture_output=True,
                    timeout=TRIAL_S,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired):
                continue
            if trial.returncode == 0:
                return candidate
    return Kind.LIMITS


def wrap(
    command: Sequence[str],
    work: Path,
    limits: Limits = Limits(),
    using: Kind | None = None,
    reads: Sequence[Path] = (),
    devices: Sequence[Path] = (),
    proc: bool = False,
) -> list[str]:
    """The argument list that runs `command` in the sandbox with `work` as its only writable folder.

    reads: further folders it may read, besides the system's. devices: files under /dev that it may use, a GPU's.
    proc: it sees a /proc, of its own processes; libraries that look up the processor and a GPU's driver need one.
    """
    using = using or kind()
    work = work.resolve()
    limited = [*_limit_arguments(limits), *command]
    folders = [*SYSTEM_FOLDERS, *(str(path) for path in reads)]
    if using is Kind.BUBBLEWRAP:
        binds = [part for folder in folders for part in _bubblewrap_bind(folder)]
        return [
            *("bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"),
            *("--cap-drop", "ALL"),  # root keeps them else
            "--new-session",  # /dev/tty is there, and what is pushed into the user's terminal the user's shell runs
            *("--dev", "/dev", "--tmpfs", "/tmp", *binds, "--bind", str(work), str(work)),
            *[part for device in devices for part in ("--dev-bind", str(device), str(device))],
            *(("--proc", "/proc") if proc else ()),
            *("--chdir", str(work), *limited),
        ]
    if using is Kind.NAMESPACES:
        root = work / ".root"
        root.mkdir(exist_ok=True)
        return [
            *_DIE_WITH_PARENT,
            *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts"),
            *("--fork", "--kill-child", *_view_maker()),
            *(str(root), str(work), "\n".join(folders), "\n".join(map(str, devices))),
            *("1" if proc else "", _most_tasks(), *limited),
        ]
    return [*(_DIE_WITH_PARENT if _dies_with_parent() else ()), *limited]


@functools.cache
def _view_maker() -> tuple[str, ...]:
    """The program that makes the view of the namespaces, a script where it cannot be compiled."""
    try:
        return (str(compiled(NAMESPACES)),)
    except UserError:
        return _SCRIPT


@functools.cache
def _dies_with_parent() -> bool:
    """Whether this system's setpriv, if there is one, can bring that about."""
    try:
        trial = subprocess.run([*_DIE_WITH_PARENT, "true"], capture_output=True, timeout=TRIAL_S, check=False)
        return trial.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _most_tasks(release: str = platform.release()) -> str:
    """MOST_TASKS for the script above; empty before Linux 6.14, where the limit belongs to the whole machine."""
    version = re.match(r"(\d+)\.(\d+)", release)
    return str(MOST_TASKS) if version and (int(version[1]), int(version[2])) >= (6, 14) else ""


def start(arguments: Sequence[str], **options: object) -> "subprocess.Popen[bytes]":
    """Start a wrapped command in its own process group, with an empty environment but for the search path.

    It ends with the thread that starts it. Not in a session of its own, for where the system cannot bring that about:
    when we are killed, the kernel wakes a stopped group of the same session and hangs it up.
    """
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TMPDIR": "/tmp"}
    environment["CCACHE_DISABLE"] = "1"  # where the compiler's name is a link to ccache, which has no cache there
    return subprocess.Popen(arguments, env=environment, process_group=0, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload,no-any-return]


def run(arguments: Sequence[str], timeout_s: float, cwd: Path) -> Finished:
    """Run a wrapped command to its end, or kill its whole process group at the time limit."""
    with tempfile.TemporaryFile() as file:
        status = finish(start(arguments, stdout=file, stderr=subprocess.STDOUT, cwd=cwd), timeout_s)
        file.seek(0)
        return Finished(status, file.read(MAX_OUTPUT_BYTES).decode(errors="replace"))


def finish(process: "subprocess.Popen[bytes]", timeout_s: float) -> int | None:
    """The status of a process that leads a group, None where it outran its time; nothing of the group is left."""
    try:
        return process.wait() if ends(process, timeout_s) else None
    finally:
        kill(process)
        process.wait()


def ends(process: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    """Whether a process ends in time; known at once, where `Popen.wait` looks every 50 ms."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:  # a kernel before 5.3, or a system that forbids it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=timeout_s)
        return process.returncode is not None
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return bool(ended.poll(1000 * min(max(0.0, timeout_s), LONGEST_S)))
    finally:
        os.close(descriptor)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """End every process of a started command."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def python_folders(*others: Path) -> list[Path]:
    """Folders that a Python in a sandbox reads beside the system's: its own, its packages' and these."""
    folders = [Path(sys.prefix), Path(sys.base_prefix), *others]
    folders += [Path(path) for path in sys.path if path.endswith("-packages")]
    folders += [path.resolve() for path in folders]
    system = (Path("/"), Path("/usr"))
    return [path for path in dict.fromkeys(folders) if path not in system and Path("/usr") not in path.parents]


def gpu_devices() -> list[Path]:
    """The device files that a process needs to use NVIDIA GPUs; empty where there are none."""
    found = [*Path("/dev").glob("nvidia*"), *Path("/dev/nvidia-caps").glob("*"), Path("/dev/dxg")]
    return sorted(path for path in found if path.is_char_device())


def gpu_libraries() -> list[str]:
    """Folders of the GPU driver's libraries: the sandbox has no list of the loader's, and a cleared environment."""
    named = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    listed = ""
    if program := shutil.which("ldconfig", path=os.environ.get("PATH", "") + ":/sbin:/usr/sbin"):
        listed = subprocess.run([program, "-p"], capture_output=True, text=True, check=False).stdout
    found = [line.rpartition("=> ")[2] for line in listed.splitlines() if "libcuda.so.1" in line]
    return list(dict.fromkeys([*named, *(str(Path(path).parent) for path in found)]))


def receive_line(connection: socket.socket, timeout_s: float, most_bytes: int) -> bytes:
    """One line from a process in a sandbox; TimeoutError without a whole line in time.

    ConnectionError where the process is gone, or sends more than `most_bytes`.
    """
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        connection.settimeout(left)
        part = connection.recv(1 << 16)
        line += part
        if not part or len(line) > most_bytes:
            raise ConnectionError("no answer" if not part else "too long an answer")
    return line


def read_left(path: Path, most_bytes: int) -> bytes | None:
    """The first bytes of a regular file that a command in a sandbox wrote; None for a link or another kind of file."""
    with _left(path) as (file, _):
        return file.read(most_bytes) if file else None


def read_all_left(path: Path, expected_bytes: int) -> bytearray | None:
    """All bytes of such a file, writable; None where its size is not `expected_bytes`."""
    with _left(path) as (file, size):
        if not file or size != expected_bytes:
            return None
        data = bytearray(size)
        return data if file.readinto(data) == size else None


@contextlib.contextmanager
def _left(path: Path) -> Iterator[tuple[io.BufferedReader | None, int]]:
    """A regular file and its size, else None."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb"))  # noqa: PTH123
            found = os.fstat(file.fileno())
        except OSError:
            yield None, 0
            return
        yield (file if stat.S_ISREG(found.st_mode) else None), found.st_size


def _limit_arguments(limits: Limits) -> list[str]:
    if not shutil.which("prlimit"):
        return []
    arguments = ["prlimit", "--core=0"]
    for option, value in (("as", limits.memory_bytes), ("fsize", limits.file_bytes)):
        if value:
            arguments.append(f"--{option}={value}")
    if limits.cpu_seconds:  # a second later SIGKILL, which says less of why
        arguments.append(f"--cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1}")
    return arguments


def _bubblewrap_bind(folder: str) -> list[str]:
    path = Path(folder)
    if path.is_symlink():
        return ["--symlink", str(path.readlink()), folder]
    return ["--ro-bind", folder, folder] if path.is_dir() else []
