"""The benchmark's table: every shape's winner against the strongest baseline, with the machine named."""

from statistics import geometric_mean

from rich.table import Table

from cuda_l2.optimizer import Result
from cuda_l2.records import Interval
from cuda_l2.report.tables import open_console
from cuda_l2.system.files import markdown_table

HEAD = (
    *("shape", "ours", "strongest baseline", "offline speedup [95 %]", "server speedup [95 %]"),
    "of measured peak",
)


def markdown(results: list[Result]) -> str:
    """The table in Markdown; shapes without a report are left out and named below."""
    rows: list[tuple[object, ...]] = []
    ratios: list[float] = []
    missing: list[str] = []
    for result in results:
        offline = result.reports.get("offline")
        server = result.reports.get("server")
        if not offline or not server or not offline.timing or not server.timing:
            missing.append(str(result.task))
            continue
        timing = offline.timing
        assert timing.candidate and timing.speedup and server.timing.speedup
        arm = next(arm for arm in timing.baselines if arm.name == timing.reference)
        strongest = f"{arm.name}, {arm.latency_us.estimate:.3g} us"
        ours_us = timing.candidate.latency_us.estimate
        share = result.task.flops / ours_us * 1e-3 / result.target.unit[1] / result.target.ceilings()[0]
        ratios.append(timing.speedup.estimate)
        speedups = _ratio(timing.speedup), _ratio(server.timing.speedup)
        rows.append((result.task, f"{ours_us:.3g} us", strongest, *speedups, f"{share:.0%}"))
    if ratios:
        rows.append(("geometric mean", "", "", f"**{geometric_mean(ratios):.3f}**", "", ""))
    overhead = max((result.search.overhead for result in results), default=0.0)
    environment = next((trial.environment for result in results for trial in result.reports.values()), {})
    notes = [
        "",
        f"All but compiling, checking and timing kernels took at most {overhead:.1%} of a search's time.",
        "Kernels tried: " + ", ".join(f"{r.task}: {r.search.proposed}" for r in results) + ".",
        "Machine: " + ", ".join(f"{name} {value}" for name, value in environment.items() if name != "flags") + ".",
    ]
    if missing:
        notes.append("Without a report: " + ", ".join(missing) + ".")
    return "\n".join([*markdown_table(HEAD, rows), *notes]) + "\n"


def print_results(results: list[Result]) -> None:
    """The same in 80 columns, without what only a file has room for."""
    table = Table("shape", "ours", "offline speedup", "server speedup")
    ratios = []
    for result in results:
        timings = {name: trial.timing for name, trial in result.reports.items()}
        offline = timings.get("offline")
        ours = f"{offline.candidate.latency_us.estimate:.3g} us" if offline and offline.candidate else "-"
        speedups = [timing.speedup if timing else None for timing in (offline, timings.get("server"))]
        ratios += [speedups[0].estimate] if speedups[0] else []
        table.add_row(str(result.task), ours, *(_short(speedup) if speedup else "-" for speedup in speedups))
    if ratios:
        table.add_row("geometric mean", "", f"{geometric_mean(ratios):.2f}", "")
    console = open_console()
    console.print(table)
    console.print("Speedups are over the strongest baseline, with 95 % intervals. -: not measured.")


def _short(ratio: Interval) -> str:
    return f"{ratio.estimate:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _ratio(ratio: Interval) -> str:
    return f"{ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
