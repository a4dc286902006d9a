"""A table with a row a shape: its winner against the strongest baseline, back to back and with cold caches."""

from collections.abc import Sequence
from statistics import geometric_mean

from rich.table import Table

from cuda_l2.records import Gemm, Timing
from cuda_l2.report.tables import open_console
from cuda_l2.runs.results import Header, Measurement
from cuda_l2.system.files import markdown_table

HEAD = (*("shape", "ours", "strongest baseline", "offline speedup [95 %]", "server speedup [95 %]"), "of measured peak")


def markdown(header: Header, measurements: Sequence[Measurement]) -> str:
    """The table in Markdown, small shapes first; those that were not timed back to back are left out."""
    rows: list[tuple[object, ...]] = []
    peak = float(header.environment.get("peak_gflops") or 1e3 * float(header.environment.get("peak_tflops") or "nan"))
    timed = _timed(measurements)
    for gemm, offline, server in timed:
        arm = next(arm for arm in offline.baselines if arm.name == offline.reference)
        strongest = f"{arm.name}, {arm.latency_us.estimate:.3g} us"
        share = gemm.flops / _ours_us(offline) * 1e-3 / peak
        speedups = _ratio(offline, ".3f"), _ratio(server, ".3f")
        rows.append((gemm, f"{_ours_us(offline):.3g} us", strongest, *speedups, f"{share:.0%}"))
    if not rows:
        return ""
    rows.append(("geometric mean", "", "", f"**{_mean(timed):.3f}**", "", ""))
    return "\n".join([*markdown_table(HEAD, rows), "", ""])


def print_shapes(measurements: Sequence[Measurement]) -> None:
    """The same on the terminal in 80 columns, without what only a file has room for, and why others have no row."""
    timed, console = _timed(measurements), open_console()
    if timed:
        table = Table("shape", "ours", "offline speedup", "server speedup")
        for gemm, offline, server in timed:
            table.add_row(str(gemm), f"{_ours_us(offline):.3g} us", _ratio(offline, ".2f"), _ratio(server, ".2f"))
        table.add_row("geometric mean", "", f"{_mean(timed):.2f}", "")
        console.print(table)
        console.print("Speedups are over the strongest baseline, with 95 % intervals. -: not measured.")
    for said in dict.fromkeys(f"{each.gemm}: {each.reason}" for each in measurements if each.reason):
        console.print(said)


def _timed(measurements: Sequence[Measurement]) -> list[tuple[Gemm, Timing, Timing | None]]:
    """Every shape that was timed back to back, with that timing and the other protocol's; small shapes first."""
    found: dict[Gemm, dict[str, Timing | None]] = {}
    for measurement in sorted(measurements, key=lambda each: each.gemm.flops):
        found.setdefault(measurement.gemm, {})[measurement.protocol] = measurement.timing
    pairs = [(gemm, timings.get("offline"), timings.get("server")) for gemm, timings in found.items()]
    return [(gemm, offline, server) for gemm, offline, server in pairs if offline and offline.speedup]


def _mean(timed: Sequence[tuple[Gemm, Timing, Timing | None]]) -> float:
    return geometric_mean(offline.speedup.estimate for _, offline, _ in timed if offline.speedup)


def _ours_us(timing: Timing) -> float:
    assert timing.candidate
    return timing.candidate.latency_us.estimate


def _ratio(timing: Timing | None, form: str) -> str:
    return timing.speedup.text(form) if timing and timing.speedup else "-"
