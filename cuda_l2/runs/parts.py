"""A command on several GPUs: a process for each, which measures one part of the items into an output of its own.

    cuda-l2 COMMAND --workers auto --out OUT
      cuda-l2 COMMAND --part 1/2 --out OUT's gpu-0     CUDA_VISIBLE_DEVICES=0
      cuda-l2 COMMAND --part 2/2 --out OUT's gpu-1     CUDA_VISIBLE_DEVICES=1

What a process has measured stays when it dies; it is started again, and goes on from there. What is missing when all
have ended is measured by the command itself.

Parts are fixed at the start, but for the shapes of a grid on the GPUs of one machine, which take very different times:
there each process takes the next shape that no other has `Taken`.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path

from cuda_l2.runs import on_ray, workers
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.lines import open_alone

TAKEN = "taken"
DONE = b"1"


class Taken(Closing):
    """Items of a command, by number, that processes take from one file: a byte each, locked while one works on it.

    The item of a process that dies is free again. UserError where the file cannot be written or locked.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._held = path, -1
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    def take(self, number: int) -> bool:
        """Whether an item is this process's to do; the one that it took before counts as done from now on."""
        if number == self._held:
            return True
        self.done()
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):  # POSIX has either where another holds it
            return False
        except OSError as error:
            raise UserError(
                f"cannot lock {self._path}: {error.strerror}; choose a folder on another file system"
            ) from None
        self._held = number
        if os.pread(self._file, 1, number) == DONE:
            self.done()
            return False
        return True

    def done(self) -> None:
        """The item taken last is done."""
        if self._held >= 0:
            os.pwrite(self._file, DONE, self._held)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._held)
            self._held = -1

    def close(self) -> None:
        os.close(self._file)


def share(
    asked: str,
    out: Path,
    results: str,
    say: Callable[[str], None],
    changed: Callable[[int], Mapping[str, str]] = lambda count: {},
    ended: Container[int] = (0,),
    *,
    by_item: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> bool:
    """Have every GPU do its part of this command into an output of its own; whether all say that they are done.

    asked: what --workers says. out: the command's folder, in which a run goes on from the file `results`; or that file
    itself where this is empty. changed: further options of the parts, by the number of these. ended: exit statuses of a
    part that is done. by_item: parts on this machine also take what others have left, with --taken. meanwhile: what
    this process does once they have begun.
    """
    with _pool(asked) as (found, run), contextlib.ExitStack() as held:
        commands, taken = {}, out / TAKEN
        by_item = by_item and not on_ray.is_ray(asked)
        if by_item:
            out.mkdir(exist_ok=True)
            held.enter_context(open_alone(out / f"{TAKEN}.lock"))
            held.callback((out / f"{TAKEN}.lock").unlink, missing_ok=True)
            taken.write_bytes(b"")
            held.callback(taken.unlink, missing_ok=True)
        for number, gpu in enumerate(found, 1):
            place = out / f"gpu-{gpu}" if results else out.with_name(f"{out.stem}.gpu-{gpu}{out.suffix}")
            if (out / results).exists() and not (place / results).exists():  # so that nothing is measured twice
                (place / results).parent.mkdir(exist_ok=True)
                shutil.copyfile(out / results, place / results)
            which = {"--part": f"{number}/{len(found)}"} | ({"--taken": str(taken)} if by_item else {})
            own = {"--workers": "", **which, "--out": str(place), **changed(len(found))}
            commands[gpu] = workers.own_arguments(sys.argv[1:], own)
        return run(commands, say, ended=ended, meanwhile=meanwhile)


def files(out: Path, results: str) -> list[Path]:
    """Files of results of parts, also of those of earlier runs, whatever their number was."""
    there = out.glob(f"gpu-*/{results}") if results else out.parent.glob(f"{glob.escape(out.stem)}.gpu-*{out.suffix}")
    return sorted(path for path in there if path.suffix != ".lines")  # a recording's journal


def take_over(out: Path, results: str, into: Callable[[Path], bool | None]) -> None:
    """Give each file of results that parts have left in a command's folder to `into`.

    The part's folder is removed afterwards, unless that says False. So a command goes on from what parts did, also
    where it has another number of parts now.
    """
    for file in sorted(out.glob(f"gpu-*/{results}")):
        if into(file) is not False:
            shutil.rmtree(file.parent)


@contextlib.contextmanager
def _pool(asked: str) -> Iterator[tuple[list[str], Callable[..., bool]]]:
    """Names of the GPUs, and what runs a command line on each."""
    if on_ray.is_ray(asked):
        with on_ray.cluster(asked) as slots:
            yield slots, on_ray.share
    else:
        yield workers.gpus(asked), workers.share
