"""The program of a template: loads torch once, then forks a child for each request, which joins a sandbox.

Started by template.py. It runs no file of others itself. A request is a line of JSON with three or more descriptors:
the child's socket, its output, and what else it is to have. For each:

    this process      forks
      keeper          starts a command in a new sandbox, joins all namespaces of that command, gives up every
                      capability, forks, and waits; ends its process group once the child has ended
        child         is in the sandbox's process namespace, waits for the judge's word, runs the program's `main`

The keeper is the root of the sandbox's process tree: the sandbox's first process and the child descend from it. It is
not in the process namespace, so no process of the sandbox can address it.

Children share the addresses of this process's libraries, and Python's seed of hashes. Both are secrets that a file
could use against its own process alone, which runs its code anyway.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuda_l2.system import process_tree

READY, PREPARED, GO = "ready", b"P", b"G"
HOLDER = ("/bin/sh", "-c", f"echo {READY} && exec sleep infinity >/dev/null 2>&1")
"""The command in the new sandbox, whose namespaces the child joins."""
NAMESPACES = {
    **{"user": 0x10000000, "mnt": 0x00020000, "pid": 0x20000000, "net": 0x40000000},
    **{"ipc": 0x08000000, "uts": 0x04000000, "cgroup": 0x02000000},
}
"""Flags of setns, by the names in /proc."""
MOST_REQUEST_BYTES, MOST_DESCRIPTORS = 1 << 16, 8
MOST_DESCRIPTOR = (1 << 31) - 1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 4, 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL, CAPABILITIES = 4, 64
CAPABILITY_VERSION = 0x20080522


def main() -> None:
    """Arguments: the modules of programs, the socket's descriptor."""
    judge = socket.socket(fileno=int(sys.argv[-1]))
    for name in sys.argv[1:-1]:
        importlib.import_module(name).load()
    gc.collect()
    gc.freeze()  # no collection of a child's writes to pages that it shares
    keepers: set[int] = set()
    judge.sendall(b'{"ready": true}\n')
    while True:
        line, descriptors, _, _ = socket.recv_fds(judge, MOST_REQUEST_BYTES, MOST_DESCRIPTORS)
        if not line:  # the judge is gone
            for keeper in keepers:
                _end_group(keeper)
            return
        try:
            answer = _answer(json.loads(line), descriptors, judge, keepers)
        except Exception as error:  # noqa: BLE001 - what fails once, as a fork without memory, ends no other child
            answer = {"error": str(error)}
            for descriptor in descriptors:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        judge.sendall(json.dumps(answer).encode() + b"\n")


def _answer(request: dict[str, Any], descriptors: list[int], judge: socket.socket, keepers: set[int]) -> dict[str, Any]:
    """Do what a request asks for. keepers: those that run, which this keeps up to date."""
    if "reap" in request:
        os.waitpid(request["reap"], 0)
        keepers.discard(request["reap"])
        return {}
    answer = _started(request, descriptors, judge)
    keepers.add(answer["keeper"])
    return answer


def _started(request: dict[str, Any], descriptors: list[int], judge: socket.socket) -> dict[str, Any]:
    """The keeper, and the child and the holder of its sandbox where it has got so far."""
    told, tell = os.pipe()
    keeper = os.fork()
    if not keeper:
        try:
            os.setpgid(0, 0)
            judge.close()
            os.close(told)
            _keep(request, descriptors, tell)
        except BaseException:  # noqa: BLE001 - this is the keeper's end
            traceback.print_exc()
        finally:
            _end_group(0)
            os._exit(1)
    for descriptor in (tell, *descriptors):
        os.close(descriptor)
    with os.fdopen(told, "rb") as report:
        said = report.readline()
    return {"keeper": keeper, **json.loads(said or "{}")}


def _keep(request: dict[str, Any], descriptors: list[int], tell: int) -> None:
    """The keeper's work: it ends with the child, and with the template."""
    os.dup2(descriptors[1], 2)
    _die_with_parent()
    started = subprocess.Popen(
        request["sandbox"],
        env=request["sandbox_environment"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=_die_with_parent,  # noqa: PLW1509 - there is one thread
    )
    assert started.stdout
    if started.stdout.readline().strip() != READY.encode():
        raise RuntimeError("the sandbox does not start")
    holder = process_tree.processes(started.pid)[-1]  # each starts one child
    # as the sandbox has it: Linux may divide cores among sessions, and a call took 3 times as long in one of its own
    in_new_session = os.getsid(holder) != os.getsid(0)
    _join(holder)
    _give_up_privileges()
    _die_with_parent()  # which a change of credentials may have undone
    child = os.fork()
    if not child:
        _become(request, descriptors, in_new_session=in_new_session)
    for descriptor in descriptors:
        os.close(descriptor)  # the judge sees when the child has closed its own
    os.write(tell, json.dumps({"child": child, "holder": holder}).encode() + b"\n")
    os.close(tell)
    os.waitpid(child, 0)


def _become(request: dict[str, Any], descriptors: list[int], *, in_new_session: bool) -> None:
    """The child's work: nothing of the template's descriptors, environment and random numbers is left."""
    status = 1
    try:
        if in_new_session:
            os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        sys.argv = [request["program"], *request["arguments"]]
        _take_descriptors(descriptors, request["descriptors"])
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()
        random.seed()
        connection = request["descriptors"][0]
        os.write(connection, PREPARED)
        if os.read(connection, 1):  # the judge has seen that this process is in the sandbox
            importlib.import_module(request["program"]).main()
            status = 0
    except BaseException:  # noqa: BLE001 - this is the child's end
        traceback.print_exc()
    finally:
        os._exit(status)


def _take_descriptors(given: Sequence[int], numbers: Sequence[int]) -> None:
    """Have the socket, the output and the others: the output as 1 and 2, each other under the number it is known by."""
    wanted = [numbers[0], 1, *numbers[1:]]
    above = max(wanted) + 1
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above + index) for index, descriptor in enumerate(given)]
    os.closerange(0, min(kept))
    for descriptor, number in zip(kept, wanted, strict=True):
        os.dup2(descriptor, number)
    os.dup2(1, 2)
    os.closerange(above, MOST_DESCRIPTOR)
    os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # as 0, the lowest that is free


def _join(pid: int) -> None:
    """Join the namespaces of a process that are not ours, at once: a user namespace's owner may join what it owns."""
    flags = 0
    for name, flag in NAMESPACES.items():
        if Path(f"/proc/{pid}/ns/{name}").readlink() != Path(f"/proc/self/ns/{name}").readlink():
            flags |= flag
    _call("setns", os.pidfd_open(pid), flags)


def _give_up_privileges() -> None:
    """As `sandbox.wrap` has it for its commands: no capability, none to be gained, no core file."""
    for capability in range(CAPABILITIES):
        try:
            _control(PR_CAPBSET_DROP, capability)
        except OSError:  # there are no more
            break
    _control(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    _control(PR_SET_NO_NEW_PRIVS, 1)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _call("capset", header, none)
    _control(PR_SET_DUMPABLE, 1)  # as a program is that was started: its /proc is its own
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _die_with_parent() -> None:
    _control(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _control(option: int, value: int) -> None:
    _call("prctl", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def _call(name: str, *arguments: Any) -> None:
    """A function of the C library's; OSError where it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
