"""A command on several GPUs: a process for each, which measures one part of the items into an output of its own.

    cuda-l2 COMMAND --workers auto --out OUT
      cuda-l2 COMMAND --part 1/2 --out OUT's gpu-0     CUDA_VISIBLE_DEVICES=0
      cuda-l2 COMMAND --part 2/2 --out OUT's gpu-1     CUDA_VISIBLE_DEVICES=1

What a process has measured stays when it dies; it is started again, and goes on from there. What is missing when all
have ended is measured by the command itself.
"""

import os
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path

from cuda_l2.rigs.elsewhere import CLI, visible_gpus
from cuda_l2.system import process_tree
from cuda_l2.system.errors import UserError

TRIES = 3
"""A process that a signal ended so often is not started again."""
INTERRUPTED = 130


def gpus(asked: str) -> list[str]:
    """GPUs as CUDA_VISIBLE_DEVICES names them: all that are visible for `auto`, else as many as asked for."""
    import torch  # noqa: PLC0415 - options must be read in no time

    found = visible_gpus(torch.cuda.device_count())
    if asked != "auto" and not (asked.isdecimal() and int(asked)):
        raise UserError(f"--workers is auto or a number of GPUs, not {asked!r}")
    count = len(found) if asked == "auto" else int(asked)
    if not found or count > len(found):
        raise UserError(
            f"--workers {asked}: there are {len(found)} GPUs to work on; `cuda-l2 doctor` says what is missing"
        )
    return found[:count]


def parts(
    asked: str,
    out: Path,
    results: str,
    say: Callable[[str], None],
    changed: Callable[[int], Mapping[str, str]] = lambda count: {},
    ended: Container[int] = (0,),
) -> list[Path]:
    """Have every GPU do its part of this command into an output of its own; the files of results that are there.

    out: the command's folder, in which a run goes on from the file `results`; or that file itself where this is empty.
    changed: further options of the parts, by the number of these. ended: statuses of a part that is done.
    """
    found, commands = gpus(asked), {}
    for number, gpu in enumerate(found, 1):
        place = out / f"gpu-{gpu}" if results else out.with_name(f"{out.stem}.gpu-{gpu}{out.suffix}")
        if (out / results).exists() and not (place / results).exists():  # so that nothing is measured twice
            (place / results).parent.mkdir(exist_ok=True)
            shutil.copyfile(out / results, place / results)
        own = {"--workers": "", "--part": f"{number}/{len(found)}", "--out": str(place), **changed(len(found))}
        commands[gpu] = own_arguments(sys.argv[1:], own)
    share(commands, say, ended=ended)
    there = out.glob(f"gpu-*/{results}") if results else out.parent.glob(f"{out.stem}.gpu-*{out.suffix}")
    return sorted(path for path in there if path.suffix != ".lines")  # a recording's journal


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
) -> None:
    """Run a command line on each GPU until all have ended, and say line by line what they say.

    KeyboardInterrupt once all have ended, where one was interrupted. One that ends with an error is not started again;
    ended: statuses that are none.
    """
    interrupted = False
    with selectors.DefaultSelector() as streams:
        all_workers = [_Worker(gpu, [*program, *arguments]) for gpu, arguments in commands.items()]
        for worker in all_workers:
            streams.register(worker.errors, selectors.EVENT_READ, worker)
        while streams.get_map():
            try:
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
                status = worker.end()
                interrupted = interrupted or status in (INTERRUPTED, -signal.SIGINT)
                if status < 0 and not interrupted and worker.tries < TRIES:
                    say(f"GPU {worker.gpu}: ended by signal {-status}; started again")
                    worker.start()
                    streams.register(worker.errors, selectors.EVENT_READ, worker)
                elif status not in ended and not interrupted:
                    say(f"GPU {worker.gpu}: ended with status {status}; what it has not measured is measured after")
    if interrupted:
        raise KeyboardInterrupt


class _Worker:
    """The process of one GPU."""

    def __init__(self, gpu: str, command: Sequence[str]) -> None:
        self.gpu, self.tries, self._command, self._said = gpu, 0, command, b""
        self.start()

    def start(self) -> None:
        self.tries += 1
        self._process = subprocess.Popen(
            self._command,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": self.gpu},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # its tables: those of all are printed at the end
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C reaches it once, from here
            # as by Ctrl-C, so that what was measured is kept; there is one thread
            preexec_fn=lambda: process_tree.end_with_parent(signal.SIGINT),  # noqa: PLW1509
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
            say(f"GPU {self.gpu}: {line.decode(errors='replace').strip().removeprefix('cuda-l2: ')}")
        return bool(came)

    def interrupt(self) -> None:
        """As by Ctrl-C: it keeps what it has measured, and ends."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """The exit status, negative for a signal."""
        assert self._process.stderr
        self._process.stderr.close()
        return self._process.wait()
