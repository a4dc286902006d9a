"""The files of a checkout that were tried, as lines and as a table."""

import collections
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cuda_l2.kernelbench.examined import Examined, Readiness
from cuda_l2.system.text import counted

FLAT = "files"
"""The column of files that are in no folder of their own."""


def print_examined(found: Examined) -> None:
    """One line of a file that was tried."""
    if found.task is None:
        print(f"{found.status:<16} {found.name}: {found.reason}", flush=True)
        return
    tried = str(found.task).partition("@")[2].partition(":")[2]
    notes = [f"at {tried}"] if tried else []
    notes += [f"{found.seconds * 1e3:.3g} ms", counted(len(found.task.weights), "weight")]
    print(f"{found.status:<16} {found.name}: {', '.join(notes)}", flush=True)


def print_counts(found: Sequence[Examined]) -> None:
    """Number of files of each level, or folder, by their status."""
    levels = sorted({_level(each.name) for each in found})
    counts = {level: collections.Counter(e.status for e in found if _level(e.name) == level) for level in levels}
    table = Table()
    for name in ("", *levels, "all"):
        table.add_column(name)
    for status in Readiness:
        numbers = [counts[level][status] for level in levels]
        if any(numbers):
            table.add_row(str(status), *map(str, numbers), str(sum(numbers)))
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=160)
    console.print(table)
    ready = [each for each in found if each.status is Readiness.READY]
    smaller = sum(1 for each in ready if each.task and each.task.sizes)
    console.print(
        f"tasks: {len(ready)} of {counted(len(found), 'file')}"
        + (f", {smaller} of them tried at smaller sizes than written" if smaller else "")
    )


def _level(name: str) -> str:
    words = name.split("/")
    return words[1] if len(words) > 2 else FLAT
