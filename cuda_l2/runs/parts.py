"""A command on several GPUs: a process for each, which measures one part of the items into an output of its own.

    cuda-l2 COMMAND --workers auto --out OUT
      cuda-l2 COMMAND --part 1/2 --out OUT's gpu-0     CUDA_VISIBLE_DEVICES=0
      cuda-l2 COMMAND --part 2/2 --out OUT's gpu-1     CUDA_VISIBLE_DEVICES=1

What a process has measured stays when it dies; it is started again, and goes on from there. What is missing when all
have ended is measured by the command itself.
"""

import contextlib
import glob
import shutil
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path

from cuda_l2.runs import on_ray, workers


def share(
    asked: str,
    out: Path,
    results: str,
    say: Callable[[str], None],
    changed: Callable[[int], Mapping[str, str]] = lambda count: {},
    ended: Container[int] = (0,),
) -> list[Path]:
    """Have every GPU do its part of this command into an output of its own; the files of results that are there.

    asked: what --workers says. out: the command's folder, in which a run goes on from the file `results`; or that file
    itself where this is empty. changed: further options of the parts, by the number of these. ended: exit statuses of a
    part that is done. The files are also those of parts of earlier runs, whatever the number of parts was.
    """
    with _pool(asked) as (found, run):
        commands = {}
        for number, gpu in enumerate(found, 1):
            place = out / f"gpu-{gpu}" if results else out.with_name(f"{out.stem}.gpu-{gpu}{out.suffix}")
            if (out / results).exists() and not (place / results).exists():  # so that nothing is measured twice
                (place / results).parent.mkdir(exist_ok=True)
                shutil.copyfile(out / results, place / results)
            own = {"--workers": "", "--part": f"{number}/{len(found)}", "--out": str(place), **changed(len(found))}
            commands[gpu] = workers.own_arguments(sys.argv[1:], own)
        run(commands, say, ended=ended)
    there = out.glob(f"gpu-*/{results}") if results else out.parent.glob(f"{glob.escape(out.stem)}.gpu-*{out.suffix}")
    return sorted(path for path in there if path.suffix != ".lines")  # a recording's journal


def take_over(out: Path, results: str, into: Callable[[Path], None]) -> None:
    """Give each file of results that parts have left in a command's folder to `into`, then remove that part's folder.

    So a command goes on from what parts did, also where it has another number of parts now, or none.
    """
    for file in sorted(out.glob(f"gpu-*/{results}")):
        into(file)
        shutil.rmtree(file.parent)


@contextlib.contextmanager
def _pool(asked: str) -> Iterator[tuple[list[str], Callable[..., None]]]:
    """Names of the GPUs, and what runs a command line on each."""
    if on_ray.is_ray(asked):
        with on_ray.cluster(asked) as slots:
            yield slots, on_ray.share
    else:
        yield workers.gpus(asked), workers.share
