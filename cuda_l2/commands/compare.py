"""cuda-l2 compare: searchers side by side on a recorded world, without its machine."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2.commands._options import require_writable, tell
from cuda_l2.system.files import write_text


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """How to compare."""

    world: Path
    """File that `cuda-l2 record` wrote."""
    held_out: str = "10"
    """Tasks to search: a number of them, always the same; their texts with commas; or a file with one a line. Searchers
    may know the measurements of all others."""
    searchers: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (
        *("schedule", "random", "tpe", "ranked", "nearest", "boosted", "transfer"),
        *("kernel-tuner:genetic_algorithm", "kernel-tuner:hybrid_vndx"),
    )
    """schedule (the policy, untrained), schedule:FILE (with trained weights), frozen, frozen:FILE (without updates),
    random, tpe, ranked (the kernels' own models), nearest (what was best on the nearest tasks), boosted (a cost model
    of the search so far), transfer (the same, fitted on the other tasks before), kernel-tuner:STRATEGY, or a language
    model that is asked once which schedules to try, as openai:NAME@URL."""
    seeds: int = 5
    """Searches of each searcher on each task."""
    measurements: int = 64
    """Schedules measured in a search; one that comes again counts once."""
    out: Path = Path("comparison")
    """Folder for comparison.md, comparison.csv, comparison.svg, and environment.json with the world's machine."""


def command(*, settings: CompareSettings) -> None:
    """Print every searcher's regret against the best recorded kernel, by number of measurements."""
    require_writable(settings.out / "comparison.md")

    from cuda_l2.worlds.world import read

    world = read(settings.world, tell)

    from cuda_l2.report.comparison import csv, figure, table
    from cuda_l2.runs.comparison import compare
    from cuda_l2.runs.results import ENVIRONMENT
    from cuda_l2.worlds.split import split

    learnt, held_out = split(world.tasks, settings.held_out)
    curves = compare(world, learnt, held_out, settings.searchers, settings.seeds, settings.measurements, tell)
    text = table(curves, str(world))
    print(text, end="")
    for suffix, content in (("md", text), ("csv", csv(curves)), ("svg", figure(curves))):
        write_text(settings.out / f"comparison.{suffix}", content)
    said = {name: str(value) for name, value in asdict(settings).items() if name not in ("searchers", "out")}
    head = world.head
    shared = {"machine": head.machine, "environment": head.environment, "settings": said, "date": head.created[:10]}
    write_text(settings.out / ENVIRONMENT, json.dumps(shared, indent=1) + "\n")
    tell(f"table, figures and plot are in {settings.out}")
