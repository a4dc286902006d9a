"""kernelbench/template.py: a process that is forked into a sandbox is wholly inside, and has nothing of others."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_l2.kernelbench import sandboxed, template, template_main
from cuda_l2.kernelbench.files import entry_of
from cuda_l2.kernelbench.opened import OpenedFile
from cuda_l2.kernelbench.process import Module, Resources
from cuda_l2.kernelbench.sandboxed import SandboxedPython
from cuda_l2.system import process_tree, sandbox

pytestmark = pytest.mark.skipif(sandbox.kind() is sandbox.Kind.LIMITS, reason="there is no sandbox on this machine")

ASKS = """
import json, os, random, sys
import numpy

def load():
    pass

def main():
    connection = int(sys.argv[1])
    os.write(connection, b'{"ready": true}\\n')
    while line := os.read(connection, 1 << 16):
        try:
            answer = eval(json.loads(line)["ask"])
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(connection, json.dumps(answer).encode() + b"\\n")

if __name__ == "__main__":
    main()
"""
"""A program that says what a file of others would find."""

FILE = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x + 1

def get_inputs():
    return [torch.rand(4)]

def get_init_inputs():
    return []
"""

COMMON = {*template.BASE, "LC_CTYPE", "PWD", "OLDPWD"}
"""Variables of every sandbox's commands, which bubblewrap clears in part, and of a shell in between."""

Start = Callable[..., SandboxedPython]


@pytest.fixture(scope="module", autouse=True)
def joined(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where the system lets no process join a sandbox: util-linux's nsenter shows that without our code."""
    holder = sandbox.wrap(template_main.HOLDER, tmp_path_factory.mktemp("folder"), proc=True)
    with subprocess.Popen(holder, env=template.BASE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline().strip() == template_main.READY
            inside = process_tree.processes(process.pid)[-1]
            joins = ["nsenter", f"--target={inside}", "--user", "--preserve-credentials", "--mount", "--pid", "--net"]
            refused = subprocess.run([*joins, "/bin/true"], check=False, capture_output=True, text=True)
        except FileNotFoundError:  # no nsenter: the tests will tell
            return
        finally:
            process.kill()
    if refused.returncode:
        pytest.skip(f"processes cannot join a sandbox here: {refused.stderr.strip()}")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """start(): the program in a sandbox of its own, from one template."""
    (tmp_path / "asks.py").write_text(ASKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(template, "_templates", [])
    monkeypatch.setattr(template, "_gave_up", False)
    monkeypatch.setattr(template, "PROGRAMS", ("asks",))
    readable = sandboxed.readable
    monkeypatch.setattr(sandboxed, "readable", lambda: [*readable(), tmp_path])
    started: list[SandboxedPython] = []

    def run(**options: object) -> SandboxedPython:
        started.append(SandboxedPython("asks", {"a": b"text"}, **options))  # type: ignore[arg-type]
        return started[-1]

    yield run
    for process in started:
        process.close()
    for known in template._templates:
        known.close()


def ask(process: SandboxedPython, expression: str) -> object:
    process.send({"ask": expression})
    line = sandbox.receive_line(process._connection, 600, 1 << 20)
    return json.loads(line)


def is_forked(process: SandboxedPython) -> bool:
    return isinstance(process._process, template.Forked)


def test_a_forked_process_is_what_one_would_be_that_was_started(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    forked = start()
    monkeypatch.setattr(sandboxed, "the_template", lambda *_: None)
    plain = start()
    assert is_forked(forked) and not is_forked(plain)
    for expression in (
        "sorted(os.listdir('/'))",
        "sorted(os.listdir('.'))",
        "sorted(os.listdir('/dev'))",
        "open('/proc/self/limits').read()",
        "[line for line in open('/proc/self/status') if line.startswith(('Uid', 'Gid', 'Groups', 'Cap', 'NoNew', 'Secc'))]",
        f"sorted(item for item in os.environ.items() if 'scratch' not in item[1] and item[0] not in {COMMON})",
        f"sorted(os.environ.keys() - {COMMON})",
        "os.stat('/proc/self/fd/0').st_rdev",
        "os.getsid(0) == 0",  # one from outside
        "oct(os.umask(0o22))",
        "sys.argv[0].endswith(('asks', 'asks.py'))",
        "sys.path",
        "open('/proc/self/cgroup').read()",
        "open('/etc/hostname').read()",
        "sorted(name for name in os.listdir('/sys/class/net'))",
        "open('written-by-it', 'w').close()",
        "open('/usr/written-by-it', 'w').close()",
    ):
        assert ask(forked, expression) == ask(plain, expression), expression
    assert ask(forked, "len([name for name in os.listdir('/proc') if name.isdigit()])") in (2, 3), (
        "the sandbox's own, and it"
    )
    assert ask(forked, "os.getppid()") == 0, "what forked it cannot be addressed"


def test_the_programs_that_run_files_are_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they load for a template leaves nothing there that children would share."""
    monkeypatch.setattr(template, "_gave_up", False)  # by a test of what a lost template costs
    monkeypatch.setattr(template, "_templates", [])
    (path := tmp_path / "task.py").write_text(FILE)
    with OpenedFile(entry_of(path)) as file:
        assert len(file.inputs(seeds=[0, 1])) == 2 and file._process and is_forked(file._process)
    with Module(FILE.encode(), "Model", Resources("cpu", 1, 2 << 30, 1 << 20, 600)) as module:
        assert is_forked(module._process)
    (known,) = template._templates
    known.close()


def test_it_has_no_descriptor_but_its_own(start: Start, tmp_path: Path) -> None:
    with (tmp_path / "shared").open("wb") as file:
        process = start(pass_fds=[file.fileno()])
        held = ask(process, "sorted(int(name) for name in os.listdir('/proc/self/fd'))")
        assert isinstance(held, list) and file.fileno() in held
        assert len(held) == len({0, 1, 2}) + len(["socket", "file", "the folder that is listed"])


def test_it_cannot_write_the_program_that_it_executes(start: Start) -> None:
    process = start()
    assert "memfd:" in str(ask(process, "os.readlink('/proc/self/exe')"))
    found = ask(process, f"__import__('fcntl').fcntl(os.open('/proc/self/exe', os.O_RDONLY), {fcntl.F_GET_SEALS})")
    assert found == template.SEALS
    assert "Error: [Errno" in str(ask(process, "open('/proc/self/exe', 'r+b')"))
    mapped = ask(process, "[open(f'/proc/self/map_files/{name}') for name in os.listdir('/proc/self/map_files')]")
    assert "PermissionError" in str(mapped)


@pytest.mark.parametrize("owner", [template.NOBODY, os.geteuid()])
def test_what_one_does_is_not_the_next_ones_business(owner: int, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether others own the program's file, or children do, so that a new template follows a change of it."""
    monkeypatch.setattr(template, "NOBODY", owner)
    first, second = start(), start()
    ask(first, "setattr(numpy, 'left', 1), os.environ.update(LEFT='1'), open('left', 'w').close()")
    before = ask(second, "os.stat('/proc/self/exe').st_mtime_ns")
    for left in (
        "os.utime('/proc/self/exe', ns=(1, 12345))",
        "os.setxattr('/proc/self/exe', 'user.left', b'x')",
        "os.chmod('/proc/self/exe', 0o700)",
    ):
        ask(first, left)
    third = start()
    assert is_forked(third)
    assert ask(third, "os.stat('/proc/self/exe').st_mtime_ns != 12345 and os.listxattr('/proc/self/exe') == []")
    shared = os.geteuid() == 0 and owner != 0  # whoever is no root gives nothing away
    assert (ask(third, "os.stat('/proc/self/exe').st_mtime_ns") == before) == shared
    for process in (second, third):
        assert ask(process, "[hasattr(numpy, 'left'), 'LEFT' in os.environ, os.path.exists('left')]") == [False] * 3
    drawn = [[ask(each, "random.random()"), ask(each, "numpy.random.rand()")] for each in (first, second, third)]
    assert len({number for numbers in drawn for number in numbers}) == 6


def test_one_that_is_not_wholly_inside_never_runs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is then started in the sandbox itself, and so is every later one."""
    asked: list[int] = []

    def differ(child: int, *_: object) -> list[str]:
        asked.append(child)
        return ["CapEff"]

    monkeypatch.setattr(template, "differences", differ)
    first, second = start(), start()
    assert not is_forked(first) and not is_forked(second) and len(asked) == 1
    assert ask(first, "1 + 1") == 2
    assert not Path(f"/proc/{asked[0]}/exe").exists()


def test_every_difference_is_seen(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int, set[int]]] = []
    differences = template.differences

    def kept(*given: Any) -> list[str]:
        compared.append(given)
        return differences(*given)

    monkeypatch.setattr(template, "differences", kept)
    start()
    ((child, inside, held),) = compared
    assert differences(child, inside, held) == []
    assert differences(child, inside, held - {1}) == ["descriptors"]
    assert {"user", "mnt", "pid", "net", "root", "CapBnd", "NoNewPrivs"} <= set(differences(os.getpid(), inside, held))


def test_a_template_that_is_lost_or_does_not_start_is_not_needed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start()
    (known,) = template._templates
    assert is_forked(first) and known
    held = process_tree.processes(first.pid)
    known._process.kill()
    process_tree.wait_gone(held, 60)
    first.close()
    second = start()
    assert not is_forked(second) and ask(second, "1 + 1") == 2
    monkeypatch.setattr(template, "_templates", [])
    monkeypatch.setattr(template, "_gave_up", False)
    monkeypatch.setattr(template, "SEALS", 1 << 20)
    third = start()
    assert not is_forked(third) and ask(third, "1 + 1") == 2


def test_what_fails_once_ends_no_other_process(start: Start) -> None:
    first = start()
    (known,) = template._templates
    assert known and "error" in known._ask({"reap": 1})
    first.close()
    first.close()
    second = start()
    assert is_forked(second) and ask(second, "1 + 1") == 2
    output = "__import__('subprocess').run(['readlink', '/proc/self/fd/0'], capture_output=True, text=True).stdout"
    assert ask(second, output) == "/dev/null\n"


def test_a_process_that_left_its_group_ends_too(start: Start) -> None:
    process = start()
    leaves = "[os.fork() or (os.setsid(), __import__('ctypes').CDLL(None).prctl(1, 0), __import__('time').sleep(9999))]"
    ask(process, leaves)
    held = process_tree.processes(process.pid)
    assert len(held) >= 3
    process.close()
    assert [process_tree._state(pid) for pid in held if process_tree._state(pid) not in ("", "Z", "X")] == []


JUDGE = """
import os, signal, sys
from cuda_l2.kernelbench import sandboxed, template
from cuda_l2.system import process_tree
readable = sandboxed.readable
template.PROGRAMS = ("asks",)
sandboxed.readable = lambda: [*readable(), sys.argv[2]]
sys.path.append(sys.argv[2])
process = sandboxed.SandboxedPython("asks", {})
(known,) = template._templates
held = process_tree.processes(process.pid)
process_tree.stop(process.pid)
print(known._process.pid, *held, flush=True)
os.kill(known._process.pid if sys.argv[1] == "template" else os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", ["judge", "template"])
def test_nothing_is_left_where_the_judge_or_the_template_is_killed(killed: str, tmp_path: Path) -> None:
    """Though the processes are stopped, as they are while others are timed."""
    (tmp_path / "asks.py").write_text(ASKS)
    command = [sys.executable, "-c", JUDGE, killed, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as judge:
        assert judge.stdout
        pids = [int(word) for word in judge.stdout.readline().split()]
        assert len(pids) >= 4
        process_tree.wait_gone(pids, 300)
        assert [process_tree._state(pid) for pid in pids if process_tree._state(pid) not in ("", "Z", "X")] == []
        assert judge.stdin
        judge.stdin.close()
