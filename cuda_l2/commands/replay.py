"""cuda-l2 replay: compare proposers on recorded trials, without building or timing anything."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


@Parameter(name="*")
@dataclass(frozen=True)
class ReplaySettings:
    """How to compare."""

    policies: Annotated[tuple[str, ...], Parameter(negative=())] = ("schedule", "frozen", "random", "tpe")
    """Proposers; frozen is the schedule policy without its updates."""
    seeds: int = 10
    """Searches a proposer."""
    trials: int = 120
    """Candidates a search."""


def command(recording: Path, /, *, settings: ReplaySettings = ReplaySettings()) -> None:
    """Search a recording with several proposers and print how they compare, with intervals over seeds.

    Parameters
    ----------
    recording
        A file that `cuda-l2 record` wrote.
    """

    from cuda_l2.propose._recorded import load
    from cuda_l2.report.replay import compare, table

    space = load(recording)
    curves = compare(space, settings.policies, settings.seeds, settings.trials)
    print(table(space, curves))
