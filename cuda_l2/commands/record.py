"""cuda-l2 record: time a grid of schedules once, so that searches can be replayed."""

from dataclasses import dataclass, field
from pathlib import Path

from cyclopts import Parameter

from cuda_l2.commands._options import require_writable
from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place
from cuda_l2.system.text import counted

BATCH = 16


@Parameter(name="*")
@dataclass(frozen=True)
class RecordSettings:
    """Which schedules to record."""

    values: int = 3
    """Largest number of values a choice."""
    fix: dict[str, int] = field(default_factory=dict)
    """Choices to keep at one value: --fix.THREADS 2."""
    limit: int = 2000
    """Refuse grids larger than this."""
    archive: Place | None = None
    """File that keeps the trials, or postgresql://USER@HOST/DATABASE; an interrupted recording goes on from it."""


def command(shape: str, out: Path, /, *, settings: RecordSettings = RecordSettings()) -> None:
    """Build, verify and time a grid of one shape's schedules; `cuda-l2 replay` searches the recording.

    Parameters
    ----------
    shape
        As in 256x256x256.
    out
        File to write.
    """
    gemm = Gemm.parse(shape)
    require_writable(out)

    from cuda_l2.families._base import families_for
    from cuda_l2.optimizer import Optimizer
    from cuda_l2.propose._base import FamilySpace
    from cuda_l2.propose._recorded import RecordedSpace, grid, save
    from cuda_l2.search import judge_group
    from cuda_l2.settings import Settings

    with Optimizer(Settings(archive=settings.archive)) as optimizer, optimizer.evaluator(gemm) as evaluator:
        family = families_for(gemm, optimizer.target)[0]
        schedules = list(grid(family, gemm, optimizer.target, settings.fix, settings.values))
        if not schedules:
            raise UserError(f"no schedule of {family.name} for {gemm} is as --fix says; fix fewer choices")
        if len(schedules) > settings.limit:
            has = counted(len(schedules), "schedule")
            raise UserError(f"the grid has {has}, more than {settings.limit}: fix choices with --fix, or raise --limit")
        space = FamilySpace(family, gemm, optimizer.target)
        rewards = {}
        for start in range(0, len(schedules), BATCH):
            batch = schedules[start : start + BATCH]
            candidates = [space.render(values, "grid") for values in batch]
            trials = [trial for trial, _ in judge_group(evaluator, optimizer.archive, candidates)]
            rewards.update({values: trial.reward for values, trial in zip(batch, trials, strict=True)})
            print(f"{len(rewards)} of {len(schedules)}, best reward {max(rewards.values()):.3f}", flush=True)
        save(out, RecordedSpace(gemm, optimizer.target, family.choices, rewards), evaluator.environment)
