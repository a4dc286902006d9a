"""Which tasks of a world are held out from training: the same ones for the same world and words."""

import os
import random
from collections.abc import Sequence
from pathlib import Path

from cuda_l2.records import Task
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text

SEED = 0


def split(found: Sequence[Task], held_out: str) -> tuple[list[Task], list[Task]]:
    """The tasks to learn from, and those held out.

    held_out: a number of tasks, drawn at random but always the same; their texts with commas; or a file with one a
    line (# begins a comment). Empty holds out none. UserError where a task is not there, or none is left to learn from.
    """
    names = {str(task): task for task in found}
    chosen = _chosen(sorted(names), held_out.strip())
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise UserError(f"the world does not have {', '.join(unknown[:3])}; it has {', '.join(sorted(names)[:3])} ...")
    learnt = [task for name, task in sorted(names.items()) if name not in chosen]
    if not learnt:
        raise UserError(f"every task is held out: of {len(names)} at least one must be left to learn from")
    return learnt, [names[name] for name in sorted(chosen)]


def _chosen(names: Sequence[str], held_out: str) -> set[str]:
    if held_out.isdecimal():
        count = int(held_out)
        if count >= len(names):
            raise UserError(f"{count} of {len(names)} tasks cannot be held out: at least one must be left")
        return set(random.Random(SEED).sample(list(names), count))
    is_file = os.path.isfile(held_out)  # noqa: PTH113 - long lists are no paths
    texts = read_text(Path(held_out)).splitlines() if is_file else held_out.split(",")
    return {name for text in texts if (name := text.partition("#")[0].strip())}
