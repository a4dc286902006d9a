"""A process for each GPU of this machine, started again when a signal has ended it."""

import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Container, Mapping, Sequence

from cuda_l2.machine.gpus import visible
from cuda_l2.system import process_tree, variables
from cuda_l2.system.errors import UserError
from cuda_l2.system.paths import CLI

TRIES = 3
"""Starts of a process, at most, where signals end it."""
INTERRUPTED = 130
SECRETS = "RAY_AUTH"
"""Beginning of variables that no part needs."""
ON_CPU = (
    "{} goes with GPUs: on a CPU each verification and timing has the whole machine, and workers would"
    " wait for one another; several machines can share an archive (docs/scale.md)"
)


def gpus(asked: str, target: str = "auto", option: str = "--workers") -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them: all that are visible for `auto`, else as many as asked for.

    option: which asks for them. UserError where there are none, or the target is the CPU.
    """
    if target == "cpu":
        raise UserError(ON_CPU.format(option))
    found = visible()
    if asked != "auto" and not (asked.isdecimal() and int(asked)):
        raise UserError(f"{option} is auto, a number of GPUs, or for some commands ray://HOST:PORT, not {asked!r}")
    count = len(found) if asked == "auto" else int(asked)
    if not found:
        raise UserError(f"{option}: there is no GPU to work on; `cuda-l2 doctor` says what is missing")
    if count > len(found):
        raise UserError(
            f"{option} {asked}: there are {len(found)} GPUs to work on; `cuda-l2 doctor` says what is missing"
        )
    return found[:count]


def seen(gpu: str, gpus: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES of a GPU's process: this one, on which it works, and the next, for `rigs.elsewhere`."""
    following = gpus[(gpus.index(gpu) + 1) % len(gpus)]
    return gpu if following == gpu else f"{gpu},{following}"


def own_arguments(arguments: Sequence[str], changed: Mapping[str, str]) -> list[str]:
    """A command line with some options' values in place of those it has; an empty value leaves the option out."""
    kept, words = list[str](), iter(arguments)
    for word in words:
        name = word.partition("=")[0]
        if name not in changed:
            kept.append(word)
        elif name == word:
            next(words, "")  # its value
    return kept + [word for name, value in changed.items() if value for word in (name, value)]


def share(
    commands: Mapping[str, Sequence[str]],
    say: Callable[[str], None],
    program: Sequence[str] = CLI,
    ended: Container[int] = (0,),
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Run a command line on each GPU until all have ended, and say line by line what they say; whether none failed.

    KeyboardInterrupt once all have ended, where one was interrupted. One that ends with an error is not started again;
    ended: exit statuses that are no error. meanwhile: what this process has to do itself, once they have begun.
    """
    interrupted = False
    with selectors.DefaultSelector() as streams:
        all_workers = [
            Worker(seen(gpu, [*commands]), [*program, *arguments], f"GPU {gpu}: ")
            for gpu, arguments in commands.items()
        ]
        for worker in all_workers:
            streams.register(worker.errors, selectors.EVENT_READ, worker)
        due = [meanwhile]
        while streams.get_map():
            try:
                while due:
                    due.pop()()
                ready = [key.data for key, _ in streams.select()]
            except KeyboardInterrupt:
                interrupted = True
                for worker in all_workers:
                    worker.interrupt()
                continue
            for worker in ready:
                if worker.read(say):
                    continue
                streams.unregister(worker.errors)
                if not worker.end(say, ended):
                    streams.register(worker.errors, selectors.EVENT_READ, worker)
                interrupted = interrupted or worker.interrupted
    if interrupted:
        raise KeyboardInterrupt
    return not any(worker.failed for worker in all_workers)


def _end_as_by_interrupt() -> None:
    """In a child: end with its parent as by Ctrl-C, so that what was measured is kept."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's actors block it
    process_tree.end_with_parent(signal.SIGINT)


class Worker:
    """The process of one GPU. visible: its CUDA_VISIBLE_DEVICES. label: begins the lines that it says."""

    def __init__(self, visible: str, command: Sequence[str], label: str = "") -> None:
        self.interrupted, self.failed, self._tries = False, False, 0
        self._visible, self._command, self._label, self._said = visible, command, label, b""
        self._start()

    def _start(self) -> None:
        self._tries += 1
        self._process = subprocess.Popen(
            self._command,
            env={name: value for name, value in variables.given().items() if not name.startswith(SECRETS)}
            | {"CUDA_VISIBLE_DEVICES": self._visible},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # its tables: those of all are printed at the end
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C reaches it once, from here
            preexec_fn=_end_as_by_interrupt,  # noqa: PLW1509 - there is one thread, or Ray's, which hold no lock of ours
        )

    @property
    def errors(self) -> int:
        assert self._process.stderr
        return self._process.stderr.fileno()

    def read(self, say: Callable[[str], None]) -> bool:
        """Say the lines that have come; False at the stream's end."""
        came = os.read(self.errors, 1 << 16)
        *lines, self._said = (self._said + (came or b"\n")).split(b"\n")
        for line in filter(None, lines):
            say(f"{self._label}{line.decode(errors='replace').strip().removeprefix('cuda-l2: ')}")
        return bool(came)

    def interrupt(self) -> None:
        """As by Ctrl-C: it keeps what it has measured, and ends."""
        self.interrupted = True
        self._process.send_signal(signal.SIGINT)

    def end(self, say: Callable[[str], None], ended: Container[int]) -> bool:
        """At the stream's end: False where a signal had ended the process, and it was started again."""
        assert self._process.stderr
        self._process.stderr.close()
        status = self._process.wait()
        self.interrupted = self.interrupted or status in (INTERRUPTED, -signal.SIGINT)
        if status < 0 and not self.interrupted and self._tries < TRIES:
            say(f"{self._label}ended by signal {-status}; started again")
            self._start()
            return False
        self.failed = status not in ended
        if self.failed and not self.interrupted:
            say(f"{self._label}ended with status {status}; what it has not measured is measured after")
        return True
