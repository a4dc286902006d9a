"""What the GPU's counters say of a candidate, read by Nsight Compute: a few figures by short names, and as text.

The candidate is launched alone, operands in a warm L2, clocks as they are. A candidate of several launches has one set
of figures: times and bytes are summed, shares of peaks are weighted by time, what a launch has is the longest one's.

    duration_us            under the profiler, without the gaps between launches
    tensor_pct             cycles in which the tensor cores worked
    issue_pct              cycles in which a scheduler issued an instruction
    sm_pct, l2_pct, dram_pct   throughput of the busiest part of each, of its peak
    l2_to_sm_mb, sm_to_l2_mb, dram_read_mb, dram_write_mb    MB (10^6) moved
    l2_hit_pct             sectors found in L2
    occupancy_pct, occupancy_limit_pct   resident warps, of the most a multiprocessor holds: as run, and as could be
    registers, shared_kib  a thread, a block (KiB)
    waves                  of blocks
    stall_*_pct            the three reasons that warps wait for most, of their time
"""

import csv
import enum
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda import alone as cuda_alone
from cuda_l2.machine.cuda import toolkit
from cuda_l2.records import Task
from cuda_l2.system import scratch
from cuda_l2.system.errors import UserError

WARM_LAUNCHES = 3
TIMEOUT_S = 300.0
TOP_STALLS = 3


class Over(enum.Enum):
    """How the figures of several launches become one."""

    SUM = enum.auto()
    MEAN = enum.auto()
    LONGEST = enum.auto()


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure: its counter, in ns, bytes or as it is, times `scale`."""

    name: str
    counter: str
    over: Over
    scale: float = 1.0


def _of_peak(counter: str) -> str:
    return f"{counter}.avg.pct_of_peak_sustained_elapsed"


METRICS = (
    Metric("duration_us", "gpu__time_duration.sum", Over.SUM, 1e-3),
    Metric("tensor_pct", _of_peak("sm__pipe_tensor_cycles_active"), Over.MEAN),
    Metric("issue_pct", "smsp__issue_active.avg.per_cycle_active", Over.MEAN, 100),
    Metric("sm_pct", _of_peak("sm__throughput"), Over.MEAN),
    Metric("l2_pct", _of_peak("lts__throughput"), Over.MEAN),
    Metric("dram_pct", _of_peak("gpu__dram_throughput"), Over.MEAN),
    Metric("l2_to_sm_mb", "l1tex__m_xbar2l1tex_read_bytes.sum", Over.SUM, 1e-6),
    Metric("sm_to_l2_mb", "l1tex__m_l1tex2xbar_write_bytes.sum", Over.SUM, 1e-6),
    Metric("dram_read_mb", "dram__bytes_read.sum", Over.SUM, 1e-6),
    Metric("dram_write_mb", "dram__bytes_write.sum", Over.SUM, 1e-6),
    Metric("l2_hit_pct", "lts__t_sector_hit_rate.pct", Over.MEAN),
    Metric("occupancy_pct", "sm__warps_active.avg.pct_of_peak_sustained_active", Over.MEAN),
    Metric("occupancy_limit_pct", "sm__maximum_warps_per_active_cycle_pct", Over.MEAN),
    Metric("registers", "launch__registers_per_thread", Over.LONGEST),
    Metric("shared_kib", "launch__shared_mem_per_block", Over.LONGEST, 1 / 1024),
    Metric("waves", "launch__waves_per_multiprocessor", Over.LONGEST),
)
STALLS = {
    "barrier": "a barrier of the block",
    "branch_resolving": "branches",
    "dispatch_stall": "the dispatcher",
    "drain": "stores at the end",
    "gmma": "wgmma",
    "imc_miss": "constants",
    "lg_throttle": "the queue of global loads and stores",
    "long_scoreboard": "global or L2 data",
    "math_pipe_throttle": "a busy arithmetic pipe",
    "membar": "memory fences",
    "mio_throttle": "the queue of shared memory instructions",
    "misc": "other",
    "no_instruction": "instruction fetches",
    "not_selected": "their turn",
    "short_scoreboard": "shared memory",
    "sleeping": "sleeping",
    "tex_throttle": "the texture queue",
    "wait": "fixed latencies",
}
"""What warps wait for, in a reader's words."""
_ISSUING = "selected"
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
_TO_BASE = {"us": 1e3, "ms": 1e6, "s": 1e9, "usecond": 1e3, "msecond": 1e6, "second": 1e9}
_TO_BASE |= {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Kbyte/block": 1e3, "Mbyte/block": 1e6}


def counters() -> list[str]:
    """Everything the profiler is asked for."""
    return [metric.counter for metric in METRICS] + [_STALL.format(reason) for reason in (*STALLS, _ISSUING)]


def collect(cubin: Path, plan: Plan, task: Task, given: str = "") -> dict[str, float]:
    """Profile one call of a candidate; UserError where the profiler is missing or may not read the counters.

    given: the file of an Operation's inputs and weights.
    """
    wanted = counters()
    job = cuda_alone.Job(str(cubin), plan, task, WARM_LAUNCHES + 1, given=given)
    for _ in range(len(wanted)):
        folder = scratch.make_folder()
        try:
            ended = cuda_alone.run([str(find()), *_options(plan, wanted)], [job], folder, TIMEOUT_S)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        launches = parse(ended.output)
        if len(launches) == len(plan.launches):
            return figures(launches)
        unknown = unknown_counters(ended.output, wanted)
        if not unknown:
            break
        wanted = [counter for counter in wanted if counter not in unknown]
    raise UserError(
        why_not(ended.output) or f"Nsight Compute read nothing: {ended.refused or ended.fault or ended.machine}"
    )


def find() -> Path:
    """Nsight Compute's program, or a UserError that says how to get it."""
    found = toolkit.program("ncu")
    if not found:
        raise UserError("profiling needs Nsight Compute, which was not found: install it, or put ncu on the PATH")
    return found


def _options(plan: Plan, wanted: Sequence[str]) -> list[str]:
    kernels = "|".join(dict.fromkeys(launch.kernel for launch in plan.launches))
    return [
        *("--clock-control", "none", "--cache-control", "none", "--target-processes", "all"),
        *("--csv", "--page", "raw", "--print-units", "base", "--kernel-name", f"regex:^({kernels})$"),
        *("--launch-skip", str(WARM_LAUNCHES * len(plan.launches)), "--launch-count", str(len(plan.launches))),
        *("--metrics", ",".join(wanted)),
    ]


def parse(output: str) -> list[dict[str, float]]:
    """Counters of each launch in ncu's CSV (page raw, one row a launch), in ns, bytes or as they are."""
    rows = [row for row in csv.reader(line for line in output.splitlines() if line.startswith('"')) if row]
    if len(rows) < 3 or rows[0][0] != "ID":
        return []
    names, units, *launches = rows
    return [dict(_numbers(names, units, row)) for row in launches]


def _numbers(names: Sequence[str], units: Sequence[str], row: Sequence[str]) -> Iterator[tuple[str, float]]:
    for name, unit, text in zip(names, units, row, strict=False):
        if "__" in name and re.fullmatch(r"-?[\d,]+(\.\d+)?(e[+-]?\d+)?", text):
            yield name, float(text.replace(",", "")) * _TO_BASE.get(unit, 1.0)


def figures(launches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One set of figures from the counters of each launch."""
    weights = [launch.get("gpu__time_duration.sum", 1.0) or 1.0 for launch in launches]
    longest = max(range(len(launches)), key=weights.__getitem__)
    found: dict[str, float] = {}

    def mean(values: Sequence[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)

    for metric in METRICS:
        if not all(metric.counter in launch for launch in launches):
            continue
        values = [launch[metric.counter] for launch in launches]
        value = (
            values[longest] if metric.over is Over.LONGEST else sum(values) if metric.over is Over.SUM else mean(values)
        )
        value *= metric.scale
        # counters of one ratio may come from different passes: of a short launch more than all can be found in L2
        found[metric.name] = round(min(value, 100.0) if metric.name.endswith("_pct") else value, 3)
    shares = {
        reason: mean([launch.get(_STALL.format(reason), 0.0) for launch in launches]) for reason in (*STALLS, _ISSUING)
    }
    total = sum(shares.values())
    waiting = sorted(STALLS, key=lambda reason: -shares[reason])[:TOP_STALLS] if total else []
    return found | {f"stall_{reason}_pct": round(100 * shares[reason] / total, 1) for reason in waiting}


def unknown_counters(output: str, wanted: Sequence[str]) -> list[str]:
    """Those of the counters that the profiler says it does not know for this GPU."""
    errors = " ".join(line for line in output.splitlines() if line.startswith("==ERROR=="))
    said = set(re.findall(r"[\w.]+", errors))
    return [counter for counter in wanted if {counter, counter.split(".")[0]} & said]


def why_not(output: str) -> str:
    """Why there are no figures, in one line that says what to do; empty where the output does not say."""
    if "ERR_NVGPUCTRPERM" in output or "permission to access NVIDIA GPU Performance Counters" in output:
        return (
            "the driver lets only the administrator read the GPU's counters: run this as root, or load the nvidia"
            " kernel module with NVreg_RestrictProfilingToAdminUsers=0"
        )
    errors = [line.removeprefix("==ERROR==").strip() for line in output.splitlines() if line.startswith("==ERROR==")]
    cannot = next((error for error in errors if "LibraryNotLoaded" in error or "not supported" in error), "")
    if cannot:
        return (
            f"Nsight Compute cannot read this GPU's counters ({cannot}): its driver or virtual machine does not let it"
        )
    return f"Nsight Compute: {errors[0]}" if errors else ""


def summary(profile: Mapping[str, float]) -> str:
    """The figures as text for a reader or a prompt: at most eight lines, about 150 tokens."""

    def line(text: str) -> str:
        """With figures in place of names in braces; empty where one is missing."""
        try:
            return text.format(**profile)
        except KeyError:
            return ""

    stalls = sorted(((value, name[6:-4]) for name, value in profile.items() if name.startswith("stall_")), reverse=True)
    lines = [
        line("{duration_us:.2f} us under the profiler, L2 warm"),
        line("tensor cores busy {tensor_pct:.0f} % of the time, issue slots {issue_pct:.0f} %"),
        line("of their peaks: multiprocessors {sm_pct:.0f} %, L2 {l2_pct:.0f} %, DRAM {dram_pct:.0f} %"),
        line("L2 to multiprocessors {l2_to_sm_mb:.1f} MB, back {sm_to_l2_mb:.1f} MB; {l2_hit_pct:.0f} % found in L2"),
        line("DRAM read {dram_read_mb:.1f} MB, written {dram_write_mb:.1f} MB"),
        line("occupancy {occupancy_pct:.1f} % of {occupancy_limit_pct:.1f} % possible, {waves:.2f} waves of blocks"),
        line("{registers:.0f} registers a thread, {shared_kib:.1f} KiB of shared memory a block"),
        "warps wait for " + ", ".join(f"{STALLS.get(name, name)} ({name}) {value:.0f} %" for value, name in stalls)
        if stalls
        else "",
    ]
    return "\n".join(filter(None, lines))
