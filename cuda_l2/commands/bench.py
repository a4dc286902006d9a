"""cuda-l2 bench: the published table, remade."""

import datetime
import json
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from cuda_l2.commands._options import require_writable, seconds
from cuda_l2.records import Gemm

SHAPES = ("256x256x256", "512x512x512", "1024x1024x1024", "64x4096x4096:tn", "2048x128x2048", "1000x333x777")


@Parameter(name="*")
@dataclass(frozen=True)
class BenchSettings:
    """How to run the benchmark."""

    budget: str = "60s"
    """Time of search a shape."""
    policy: str = "schedule"
    """Who proposes."""
    seed: int = 0
    """Seed of the searches."""
    archive: Path | None = None
    """File that keeps the trials; a fresh one in --out by default, so that nothing is known beforehand."""
    out: Path = Path("bench-cpu")
    """Folder for the results."""


def command(shapes: list[str] | None = None, /, settings: BenchSettings | None = None) -> None:
    """Search each shape, report the winners, print the table with the geometric mean and the loop's overhead.

    Parameters
    ----------
    shapes
        The six of the README by default.
    """
    settings = settings or BenchSettings()
    gemms = [Gemm.parse(shape) for shape in shapes or SHAPES]
    budget_s = seconds(settings.budget)
    require_writable(settings.out / "table.md")

    from cuda_l2.optimizer import Optimizer, Settings
    from cuda_l2.report.bench import markdown
    from cuda_l2.report.live import LiveProgress
    from cuda_l2.report.tables import result_json

    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")
    archive = settings.archive or settings.out / f"archive-{stamp}.db"
    results = []
    with Optimizer(
        Settings(budget_s=budget_s, policy=settings.policy, seed=settings.seed, archive=archive)
    ) as optimizer:
        for gemm in gemms:
            with LiveProgress(gemm, budget_s) as live:
                results.append(optimizer.optimize(gemm, live.progress, live.stage))
            rows = [json.loads(result_json(result)) for result in results]
            (settings.out / f"results-{stamp}.json").write_text(json.dumps(rows, indent=1))
            if results[-1].search.interrupted:
                break
    text = markdown(results)
    (settings.out / f"table-{stamp}.md").write_text(text)
    print(text)
