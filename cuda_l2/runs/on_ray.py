"""A command's parts on a Ray cluster: an actor for each GPU, or for each processor slot where the cluster has no GPU.

    this command --arguments, files so far--> actor: the part, into a folder of its own
                 <--lines, what files gained--

An actor that dies or hangs, or its node, costs what it had not sent: another goes on from there. Ray's messages are
pickles, so that whoever reaches its ports runs code: it is used with token authentication alone.
"""

import contextlib
import os
import secrets
import select
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from cuda_l2.runs import workers
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported, write_bytes
from cuda_l2.system.paths import CLI

LOCAL, REMOTE = "ray", "ray://"
STEP_S = 2.0
"""How long an actor collects what it sends together."""
ANSWER_S = 300.0
"""How long an actor may take for an answer; the first is awaited for ever, since a slot may have to become free."""
REACH_S = 10.0
MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
OWN = {MODE: "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment of a Ray that is started here. The last has it listen on the loopback address alone."""
Files: TypeAlias = dict[str, bytes]
"""Contents by relative path."""


def is_ray(asked: str) -> bool:
    return asked == LOCAL or asked.startswith(REMOTE)


def require_gpus(asked: str, target: str, option: str = "--workers") -> None:
    """UserError where an option asks for what this machine and the target cannot have."""
    if not is_ray(asked):
        workers.gpus(asked, target, option)
    elif target == "cpu":
        raise UserError(workers.ON_CPU.format(option))


@contextlib.contextmanager
def cluster(asked: str) -> Iterator[list[str]]:
    """Connect to the cluster at ray://HOST:PORT, or start one on this machine for `ray`; names of its slots.

    UserError where Ray is missing, cannot be reached, refuses the token or asks for none.
    """
    before = dict(os.environ)
    if asked == LOCAL:
        os.environ.update({**OWN, TOKEN: secrets.token_hex(32)})
    elif os.environ.get(MODE) != "token":
        raise UserError(
            f"{asked}: whoever reaches a Ray cluster without tokens runs code on it: start it with {MODE}=token, and"
            f" set {MODE}=token and {TOKEN} or ~/.ray/auth_token here (docs/scale.md)"
        )
    ray = imported("ray", f"--workers {asked} needs", "ray")
    own = {"address": "local", "include_dashboard": False} if asked == LOCAL else {"address": _reached(asked)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an error says the same
            ray.init(**own, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except ConnectionError as error:
        raise UserError(
            f"{asked}: {_said(error)}; no Ray server answers there, or its token is not the one of {TOKEN} or"
            " ~/.ray/auth_token here"
        ) from None
    except (RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        raise UserError(f"{asked}: {_said(error)}") from None
    try:
        yield _slots(ray, asked)
    except ray.exceptions.RayError as error:
        raise UserError(f"{asked}: {_said(error)}") from None
    finally:
        ray.shutdown()
        for name in (*OWN, TOKEN):  # what this command runs afterwards gets no token
            if name not in before:
                os.environ.pop(name, None)


def share(
    commands: Mapping[str, Sequence[str]],
    say: Callable[[str], None],
    program: Sequence[str] = (),
    ended: Container[int] = (0,),
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Run a command line on each slot until all have ended, as `workers.share` does on each GPU.

    --out of a command line names a place on this machine, to which all that the part writes comes. False, since a node
    may be of another kind than this machine.
    """
    import ray  # noqa: PLC0415 - optional

    running = {}
    for name, arguments in commands.items():
        job = _Job(name, arguments, program, ended)
        running[job.step()] = job
    meanwhile()
    interrupted = False
    while running:
        try:
            ready, _ = ray.wait(list(running), num_returns=1, timeout=STEP_S)
            for answer in due(ready, running):
                job = running[answer]  # where an interrupt comes before it is taken, it is taken again
                goes_on = job.take(answer if answer in ready else None, say, restart=not interrupted)
                interrupted = interrupted or job.interrupted
                if goes_on:
                    running[job.step()] = job
                del running[answer]
        except KeyboardInterrupt:
            interrupted = True
            for each in running.values():
                each.interrupt()
    if interrupted:
        raise KeyboardInterrupt
    return False


def due(ready: Sequence[Any], running: Mapping[Any, "_Job"]) -> list[Any]:
    """Answers that are there, and those that their actors owe for too long."""
    return [*ready, *(answer for answer, job in running.items() if job.late and answer not in ready)]


class _Job:
    """One part, and the actor that does it now."""

    def __init__(self, name: str, arguments: Sequence[str], program: Sequence[str], ended: Container[int]) -> None:
        self.name, self.interrupted, self._tries = name, False, 0
        self._place = Path(arguments[arguments.index("--out") + 1])
        self._how = arguments, tuple(program), ended
        self._start()

    def _start(self) -> None:
        import ray  # noqa: PLC0415

        self._tries += 1
        self._answered = False
        gpus = ray.cluster_resources().get("GPU", 0)
        actor = ray.remote(Part).options(num_cpus=1, num_gpus=1 if gpus else 0)
        there = {file: (self._place.parent / file).read_bytes() for file in files_of(self._place)}
        self._actor: Any = actor.remote(*self._how, self._place.name, there)

    def step(self) -> Any:
        self._asked = time.monotonic()
        return self._actor.step.remote(STEP_S)

    @property
    def late(self) -> bool:
        """Whether the actor, which has answered before, owes an answer for too long."""
        return self._answered and time.monotonic() - self._asked > ANSWER_S

    def take(self, answer: Any, say: Callable[[str], None], *, restart: bool) -> bool:
        """Keep what an actor has sent, or end it where that is None; False where the part has ended.

        restart: another may take a lost one's place.
        """
        import ray  # noqa: PLC0415

        if answer is None:
            ray.kill(self._actor)
            return self._lost(f"it gave no answer for {ANSWER_S:.0f} s", say, restart)
        try:
            lines, gained, self.interrupted, over = ray.get(answer)
        except ray.exceptions.RayError:  # it died, or failed
            return self._lost("its process or its node is gone", say, restart)
        self._answered = True
        for file, content in gained.items():
            write_bytes(self._place.parent / file, content)
        for line in lines:
            say(f"{self.name}: {line}")
        return not over

    def _lost(self, why: str, say: Callable[[str], None], restart: bool) -> bool:
        """Whether another actor goes on."""
        if self._tries == workers.TRIES or not restart:
            say(f"{self.name}: {why}; what it has not measured is measured after")
            return False
        say(f"{self.name}: {why}; started again")
        self._start()
        return True

    def interrupt(self) -> None:
        self._actor.interrupt.remote()


class Part:
    """In an actor: a command that runs, and what it has said and written since it was asked last."""

    def __init__(
        self, arguments: Sequence[str], program: Sequence[str], ended: Container[int], name: str, there: Files
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cuda-l2-ray-")
        self._place, self._ended = Path(self._folder.name) / name, ended
        for file, content in there.items():
            write_bytes(self._place.parent / file, content)
        self._sent = {file: _state(self._place.parent / file) for file in there}
        own = workers.own_arguments(arguments, {"--out": str(self._place)})
        self._worker = workers.Worker(os.environ.get("CUDA_VISIBLE_DEVICES", ""), [*(program or CLI), *own])

    def step(self, seconds: float) -> tuple[list[str], Files, bool, bool]:
        """Lines that were said within this time, files that changed, whether it was interrupted, and is over."""
        lines, over, until = list[str](), False, time.monotonic() + seconds
        while not over and select.select([self._worker.errors], [], [], max(0.0, until - time.monotonic()))[0]:
            over = not self._worker.read(lines.append) and self._worker.end(lines.append, self._ended)
        contents = {}
        for file in files_of(self._place):
            with contextlib.suppress(FileNotFoundError):  # the command has removed it meanwhile
                path = self._place.parent / file
                state = _state(path)
                if self._sent.get(file) != state:
                    contents[file] = path.read_bytes()
                    self._sent[file] = state
        return lines, contents, self._worker.interrupted, over

    def interrupt(self) -> None:
        self._worker.interrupt()


def files_of(place: Path) -> list[str]:
    """The files of a part's output, from the folder that it lies in: a folder's, or a file and its journal."""
    found = [place, place.with_name(f"{place.name}.lines"), *place.rglob("*")]
    whole = [path for path in found if path.is_file() and not path.name.startswith(".")]  # others are being written
    return [str(path.relative_to(place.parent)) for path in whole]


def _state(path: Path) -> tuple[int, int]:
    """Changes when a file does."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _mode() -> str:
    """In the cluster: how it authenticates."""
    return os.environ.get(MODE, "")


def _slots(ray: Any, asked: str) -> list[str]:
    """Names of the GPUs, or of processor slots where there are none. UserError where the cluster asks for no token."""
    if ray.get(ray.remote(_mode).options(num_cpus=0).remote()) != "token":
        raise UserError(f"{asked}: this cluster asks for no token: start it with {MODE}=token (docs/scale.md)")
    has = ray.cluster_resources()
    return [f"ray-{number}" for number in range(int(has.get("GPU", 0)) or int(has.get("CPU", 0)))]


def _reached(asked: str) -> str:
    """The address, if something listens there; UserError else."""
    host, _, port = asked.removeprefix(REMOTE).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, ValueError) as error:
        raise UserError(f"{asked} cannot be reached: {error}; give it as ray://HOST:PORT, see docs/scale.md") from None
    return asked


def _said(error: BaseException) -> str:
    """An error's last line, and not the token."""
    line = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    return line.strip().replace(os.environ.get(TOKEN) or "\0", "...")
