"""A table with a row a shape: its winner against the strongest baseline, back to back and with cold caches."""

from collections.abc import Sequence
from statistics import geometric_mean

from cuda_l2.records import Gemm, Interval
from cuda_l2.runs.results import Measurement
from cuda_l2.runs.run_file import Header
from cuda_l2.system.files import markdown_table

HEAD = (
    *("shape", "ours", "strongest baseline", "offline speedup [95 %]", "server speedup [95 %]"),
    "of measured peak",
)


def markdown(header: Header, measurements: Sequence[Measurement]) -> str:
    """The table in Markdown, small shapes first; those that were not timed back to back are left out."""
    found: dict[Gemm, dict[str, Measurement]] = {}
    for measurement in sorted(measurements, key=lambda each: each.gemm.flops):
        found.setdefault(measurement.gemm, {})[measurement.protocol] = measurement
    rows: list[tuple[object, ...]] = []
    ratios: list[float] = []
    peak = float(header.environment.get("peak_gflops") or 1e3 * float(header.environment.get("peak_tflops") or "nan"))
    for gemm, by_protocol in found.items():
        timings = {name: each.timing for name, each in by_protocol.items()}
        offline, server = timings.get("offline"), timings.get("server")
        if not offline or not offline.candidate or not offline.speedup:
            continue
        ours_us = offline.candidate.latency_us.estimate
        arm = next(arm for arm in offline.baselines if arm.name == offline.reference)
        strongest = f"{arm.name}, {arm.latency_us.estimate:.3g} us"
        speedups = _ratio(offline.speedup), _ratio(server.speedup) if server and server.speedup else "-"
        ratios.append(offline.speedup.estimate)
        rows.append((gemm, f"{ours_us:.3g} us", strongest, *speedups, f"{gemm.flops / ours_us * 1e-3 / peak:.0%}"))
    if not rows:
        return ""
    rows.append(("geometric mean", "", "", f"**{geometric_mean(ratios):.3f}**", "", ""))
    return "\n".join([*markdown_table(HEAD, rows), "", ""])


def _ratio(ratio: Interval) -> str:
    return f"{ratio.estimate:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
