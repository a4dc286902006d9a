"""cuda-l2 watch: follow a running search, table or training as a local page, or in the terminal."""

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2.commands._options import tell
from cuda_l2.system import paths
from cuda_l2.system.place import is_there

NICE = 19
"""The cores are the run's."""


def command(
    path: Path | None = None, /, *, terminal: Annotated[bool, Parameter(negative=())] = False, port: int | None = None
) -> None:
    """Follow a running search, table or training by its files, as a local page. The run does not notice.

    The page is for this machine's loopback address and whoever has the token in its address; `ssh -L` brings it to
    another machine. It may be opened before the run begins, and stays when the run is killed.

    Args:
        path: An archive, results.jsonl of bench, run.jsonl of train, or a folder with them; the usual archive where
            left out.
        terminal: Show the same in this terminal, or, where the output is a file or a pipe, print it once.
        port: Port of the page; 8765, or any free one where that is taken.
    """
    from cuda_l2.report.watch import terminal as screen
    from cuda_l2.report.watch.watcher import Watcher

    path = (path or paths.default_archive()).absolute()
    with Watcher(path, figures=not terminal) as watcher:
        if terminal:
            os.nice(NICE)
            screen.follow(watcher)
            return
        from cuda_l2.report.watch.server import serve
        from cuda_l2.system.files import imported

        imported("matplotlib.figure", "a watched page needs", "report")  # now, not when somebody looks
        if not is_there(path):
            tell(f"{path} is not there yet: the page waits for a run that writes it")
        os.nice(NICE)
        serve(watcher, port, tell)
