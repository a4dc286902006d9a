"""Lessons from a table of the best schedule of many shapes, as `cuda-l2 select` writes it.

Of the other schedules the table says only that they lost; it may be of another GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from cuda_l2.learn.settings import Schedule as Settings
from cuda_l2.library.table import family_of, read_times
from cuda_l2.propose._base import FamilySpace, UnionSpace, Values, space_for
from cuda_l2.propose._network import Encoder, Question
from cuda_l2.propose._recorded import RecordedSpace
from cuda_l2.records import Accumulate, Gemm, Task
from cuda_l2.system.errors import UserError

SHAPES = 300
"""Shapes drawn from a table."""
TRIED, RIVALS = 120, 39
"""Schedules of other shapes that are tried on a shape, and how many of them its best is told from, at most."""
EDGE = "plain"
LEAST_MNK = 1 << 19
"""Smaller products are launches and little else."""


class TableLesson:
    """One shape: its best schedule among some of other shapes."""

    speeds_N = None

    def __init__(self, task: Task, inputs_ND: torch.Tensor) -> None:
        """inputs_ND: of the best, then of the others."""
        self.task, self._inputs_ND = task, inputs_ND
        self.shares_N = torch.zeros(len(inputs_ND))
        self.shares_N[0] = 1.0

    def question(self, settings: Settings, rng: np.random.Generator) -> Question:
        return Question(self._inputs_ND, torch.ones(len(self._inputs_ND), dtype=torch.bool))


def table_lessons(
    path: Path, space: RecordedSpace, encoder: Encoder, unseen: Sequence[Task], seed: int, say: Callable[[str], None]
) -> list[TableLesson]:
    """Lessons of shapes drawn from a table, none with the sizes of an unseen task. UserError where there is none."""
    hidden = {(task.m, task.n, task.k) for task in unseen if isinstance(task, Gemm)}
    rows = [row for row in read_times(path) if row.edge == EDGE and row.gemm.accumulate is Accumulate.FP32]
    rivals = sorted({(row.family, row.schedule) for row in rows})
    rng = np.random.default_rng(seed)
    found = []
    for i in rng.permutation(len(rows)):
        gemm, own = rows[i].gemm, space_for(space.families, rows[i].gemm, space.target)
        if (gemm.m, gemm.n, gemm.k) in hidden or gemm.m * gemm.n * gemm.k < LEAST_MNK:
            continue
        tried = [rivals[j] for j in rng.choice(len(rivals), min(TRIED, len(rivals)), replace=False)]
        best = list(_valid(own, [(rows[i].family, rows[i].schedule)]))
        others = [values for values in _valid(own, tried) if values not in best][:RIVALS]
        if best and others:
            found.append(TableLesson(gemm, encoder(own, best + others)))
        if len(found) == SHAPES:
            break
    if not found:
        raise UserError(f"{path} has no schedule of the world's families to learn from")
    say(f"{path}: the best schedules of {len(found)} shapes")
    return found


def _valid(
    space: FamilySpace | UnionSpace, named: Sequence[tuple[str, tuple[tuple[str, int], ...]]]
) -> Iterator[Values]:
    """Those of the schedules that are valid in a space."""
    for name, schedule in named:
        try:
            values = space.whole(name, family_of(name).values(dict(schedule)))
        except (ValueError, KeyError):  # a choice is missing, or the family is none of the space's
            continue
        if all(value in space.valid(values[:place]) for place, value in enumerate(values)):
            yield values
