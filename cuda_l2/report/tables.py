"""Results as tables for people and JSON for programs."""

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from cuda_l2 import contract
from cuda_l2.contract.cuda import Plan
from cuda_l2.families._base import all_families
from cuda_l2.library.saved import REPORTED, why_no_win
from cuda_l2.measure.other_work import noticed
from cuda_l2.records import (
    Arm,
    Build,
    Candidate,
    Interval,
    Review,
    ReviewStatus,
    Task,
    Timing,
    Trial,
    Trust,
    to_json,
)
from cuda_l2.report.live import correct, rejected
from cuda_l2.search import Progress
from cuda_l2.system.paths import default_archive
from cuda_l2.system.place import Place
from cuda_l2.system.text import counted, plain

if TYPE_CHECKING:
    from cuda_l2.optimizer import Result

CONSOLE_WIDTH = 80
LEVEL_B = (
    "trust    B: host code, judged from outside by its results and our clock, its use of PyTorch self-reported; it"
    " enters no reward, archive, library or headline"
)
MUCH = 0.1
"""Share of a kernel's time above which the cost of a call is reported."""
PROTOCOLS = {
    "offline": "calls back to back, caches warm",
    "server": "single calls after pauses, caches cold",
    "rotating": "calls back to back, operands not in the cache",
    "server-10ms": "single calls after pauses of 10 ms, caches cold",
    "paper": "10 s of warm-up, then single calls for 30 s",
    "search": "a short timing, by which a search chooses",
    "finalists": "a short timing, by which a search chooses",
}
"""What a protocol is, for a reader of its figures."""
WIDENED = (
    "torch fp16: torch.matmul on the operands as they are. torch widened: on operands converted to fp32, and C back,"
    " which is timed too; preallocated: into buffers made beforehand; one thread: so too, with"
    " torch limited to one thread."
)
"""What the names of a CPU's baselines mean."""
OWN_COST = 0.05
"""Share of a kernel's time above which the cost of a call in it is told."""
SEARCHED = (
    *("proposed", "built", "correct", "timed", "known", "repeated", "rejected", "reviews", "checker"),
    *("seconds", "overhead", "interrupted"),
)
"""What the JSON of a result holds of the search."""
REVIEWED = {
    ReviewStatus.CONFIRMED: "measured again and confirmed",
    ReviewStatus.LOWERED: "measured again and corrected",
    ReviewStatus.UNSTABLE: "measured again and not repeated: not counted",
    ReviewStatus.WRONG: "found wrong on fresh inputs or a second device",
    ReviewStatus.SUSPECT: "rejected by the checker",
}


def print_result(result: "Result") -> None:
    """The winner against each baseline, what was rejected and left out, where the source lies."""
    console = open_console()
    best, search = result.best, result.search
    if best is None:
        console.print(ended(result))
        return
    reports = result.reports or {best.protocol: best}
    timings = [trial.timing for trial in reports.values() if trial.timing]
    console.print(f"{result.task} on {result.target.model}")
    kind = "best kernel found" if result.why_no_win else "best kernel"
    kind += ", dependent launch" if launches_early(best.candidate) else ""
    for timing in timings:
        console.print(_versus(kind, timing, "" if result.reports else ", not confirmed"))
    if result.why_no_win:
        console.print(_no_win(result) + _instead(result))
    laid_out = " of those that read B as the shape lays it out" if result.task.product else ""
    pairs = timings[0].conditions.pairs
    over = f" over {pairs} pairs of processes, torch's and ours; intervals are from the least to the largest pair"
    console.print(
        f"* the strongest baseline: the least time{laid_out}. Times are medians{over if pairs else ''}. Speedups are"
        " taken round by round, and need not be the quotients of the times."
    )
    if any(name.startswith("torch widened") for timing in timings for name, _ in timing.speedups):
        console.print(WIDENED)
    if any(math.isinf(ratio.low) for timing in timings for _, ratio in timing.speedups):
        console.print("A ratio without an interval is of a much slower baseline, which was timed only once or twice.")
    console.print(_reached(result, timings[0]))
    if said := _own_cost(timings[0]):
        console.print(said)
    if result.wins and (said := _call_cost(result, timings[0])):
        console.print(said)
    console.print(_searched(search))
    if search.reviews:
        reviewed = [
            f"{counted(count, 'suspicious speedup')} {REVIEWED[ReviewStatus(status)]}"
            for status, count in sorted(search.reviews.items())
        ]
        console.print("; ".join([*reviewed, *filter(None, [search.checker])]))
    for name, why in timings[0].conditions.left_out.items():
        console.print(f"{name} is left out: {why}")
    for timing in timings:
        if timing.conditions.drifted:
            console.print(f"{timing.protocol}, after repetitions too: {timing.conditions.drifted}")
        if busy := noticed(timing.conditions):
            console.print(f"{timing.protocol}: {busy}")
    if result.not_reported:
        console.print(f"not reported, {result.not_reported}; run again when the machine is quiet")
    if search.interrupted:
        console.print("interrupted: figures are those the search chose by, not from a run of their own")
    console.print(f"source: {result.source_path}")


def ended(result: "Result") -> str:
    """How a search ended, in a line."""
    best, search = result.best, result.search
    if search.refuted:
        return f"{result.task}: {search.refuted}; search again"
    if best is None and search.untimed:
        call = " (cuda_l2.load makes it a kernel)" if result.handed_out else ""
        return (
            f"{result.task}: {search.why_none}. Source of the last one, which was compared with"
            f" nothing{call}: {result.source_path}"
        )
    if best is None and search.interrupted and not search.proposed:
        return f"{result.task}: interrupted before a kernel was judged; the same command begins again"
    if best is None:
        said = f"; policy: {search.summary}" if search.summary else ""
        candidates = counted(search.proposed, "candidate")
        interrupted = "interrupted; " if search.interrupted else ""
        return f"{result.task}: {interrupted}no correct kernel among {candidates}; rejected: {rejected(search)}{said}"
    left = f"; not reported, {result.not_reported}" if result.reports and result.not_reported else ""
    return f"{result.task}: {_no_win(result) or 'the best kernel is faster than every baseline'}{left}"


def _no_win(result: "Result") -> str:
    """That nothing is faster than the baselines; empty where a kernel is."""
    led = "no kernel wins" if result.reports else "no report, so that no winner is confirmed"
    return f"{led}: {result.why_no_win}" if result.why_no_win else ""


def _instead(result: "Result") -> str:
    """What to call where nothing wins."""
    if not result.handed_out:
        return "; keep what you call today"
    return (
        f"\nresult.kernel, result.save and cuda_l2.load give torch's own product ({result.handed_out}) until a search"
        " finds a winner"
    )


def _versus(kind: str, timing: Timing, note: str) -> Table:
    """The best kernel and each baseline under one protocol."""
    title = f"{timing.protocol}: {PROTOCOLS.get(timing.protocol, '')}{note}"
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold")
    table.add_column("time", no_wrap=True)
    table.add_column("our speedup [95 % interval]", no_wrap=True)
    table.add_row(kind, _time(timing.candidate), "", style="bold")
    for name, ratio in timing.speedups:
        mark = " *" if name == timing.reference else ""
        table.add_row(name, _time(_arm(timing, name)) + mark, _ratio(ratio))
    return table


def _searched(search: Progress) -> str:
    """What a search did, and what it left out, in a line."""
    known = f"{search.known} known from an earlier search" if search.known else ""
    repeated = f"{search.repeated} proposed again" if search.repeated else ""
    said = [
        f"search: {counted(search.proposed, 'kernel')} tried in {search.seconds:.0f} s",
        correct(search),
        *filter(None, [known, repeated]),
        f"rejected: {rejected(search)}",
    ]
    parts = [", ".join(said)]
    if search.unjudged:
        parts.append(f"the time was up before {counted(search.unjudged, 'more kernel')} could be tried")
    elif search.proposed <= 1:
        parts.append("the time was up before more could be tried: give it longer with --budget")
    if search.queued_s >= 1:
        parts.append(f"{search.queued_s:.0f} s more went by waiting for another cuda-l2 on this machine")
    if search.summary:
        parts.append(f"policy: {search.summary}")
    return "; ".join(parts)


def _reached(result: "Result", timing: Timing) -> str:
    """How much of what the machine could do, where that was measured in a quiet moment."""
    assert timing.candidate
    latency_us = timing.candidate.latency_us.estimate
    peak, gbytes_per_s = result.target.ceilings(result.task.dtype)
    unit, gflops_a_unit = result.target.unit
    reached, most, of = result.task.bytes / latency_us * 1e-3, gbytes_per_s, "of what memory was measured to give"
    if result.task.product:
        reached, most = result.task.flops / latency_us * 1e-3 / gflops_a_unit, peak
        of = f"of the measured peak of {peak:.0f}"
    said = f"{reached:.3g} {unit if result.task.product else 'GB/s'}"
    if result.target.ceilings_doubt(result.task.dtype):
        return (
            f"{said}; other work ran while this machine's peak was measured: `cuda-l2 doctor` measures it again, in a"
            " quiet moment"
        )
    if result.task.product and reached > most:
        return (
            f"{said}, more than the {peak:.0f} that were measured as this machine's peak: one of the two is wrong;"
            " `cuda-l2 doctor` measures the peak again"
        )
    bound_us = result.target.bound_us(result.task)
    cached = result.target.cache_may_beat_bound(result.task)
    if result.task.product or not cached:
        said += f", {reached / most:.0%} {of}"
    if cached:
        return f"{said}; a cache holds its tensors, which would take {bound_us:.1f} us from memory"
    return f"{said}; no kernel takes less than {bound_us:.1f} us"


def _own_cost(timing: Timing) -> str:
    """What starting a call takes of every time, where it is much; empty elsewhere."""
    assert timing.candidate
    cost_us = timing.empty_call_us
    if not cost_us > OWN_COST * timing.candidate.latency_us.estimate:  # also where it is not known
        return ""
    return f"starting a round of calls takes about {cost_us:.2g} us, in our times and the baselines' alike"


def _call_cost(result: "Result", timing: Timing) -> str:
    """What a call from Python leaves of the speedup, where it costs much beside the kernel; empty elsewhere."""
    if result.target.name != "cpu" or not result.task.product:
        return ""
    assert timing.candidate and timing.speedup
    from cuda_l2.library.product import overhead_us  # noqa: PLC0415 - loads torch, which tables of grids do without

    kernel_us, call_us = timing.candidate.latency_us.estimate, overhead_us(result.task)
    if call_us <= MUCH * kernel_us:
        return ""
    left = timing.speedup.estimate * kernel_us / (kernel_us + call_us)
    return (
        f"a call from Python costs {call_us:.1f} us beside the kernel's {kernel_us:.1f} us:"
        f" against torch, result.kernel gives {left:.2f}x instead of {timing.speedup.estimate:.2f}x"
    )


def launches_early(candidate: Candidate) -> bool:
    """Whether a kernel may begin before the one ahead of it has ended: it gains where launches come back to back."""
    terms = contract.parse(candidate.source)
    return isinstance(terms, contract.CudaContract) and terms.programmatic


def print_trial(trial: Trial) -> None:
    """What became of one candidate, stage by stage."""
    console = open_console()
    build, verdict, timing = trial.build, trial.verdict, trial.timing
    _print_stage(console, build)
    if verdict:
        check = f" in the check '{verdict.check}'" if verdict.check else ""
        console.print(f"verdict  {verdict.status}{check}{_because(verdict.reason)} ({verdict.seconds:.2f} s)")
        console.print(f"         passed: {', '.join(verdict.passed) or 'nothing'}")
        for note in verdict.notes:
            console.print(f"         {note}")
        if not math.isnan(verdict.rms_error):
            allowed = verdict.max_allowed
            limit = "" if math.isnan(allowed) else f" ({allowed:.3g} is allowed, by the libraries' own errors)"
            console.print(
                f"         error against fp64: RMS {verdict.rms_error:.3g}, largest {verdict.max_error:.3g}{limit}"
            )
    if timing and timing.candidate and timing.speedup:
        rounds = counted(timing.candidate.rounds, "round")
        console.print(f"timing   {timing.protocol}: {_time(timing.candidate)} over {rounds}")
        for name, ratio in timing.speedups:
            console.print(f"         {_ratio(ratio)} against {name} ({_time(_arm(timing, name))})")
        if busy := noticed(timing.conditions):
            console.print(f"         {busy}")
    elif timing:
        console.print(f"timing   {timing.status}{_because(timing.reason)}")
    if trial.review:
        console.print(_review(trial.review))
    if trial.trust is Trust.B:
        console.print(LEVEL_B)
    else:
        none = "none, for it was not timed: run again when the machine is quiet"
        console.print(f"reward   {none if math.isnan(trial.reward) else f'{trial.reward:.4f}'}")


def _print_stage(console: Console, build: Build) -> None:
    took = ", ".join(filter(None, (f"{build.seconds:.2f} s", build.sandbox)))
    console.print(f"build    {build.status}{_because(build.reason)} ({took})")
    if build.status != "built" and build.log:
        console.print(build.log.rstrip())


def print_build(build: Build, plan: Plan | None, refused: str) -> None:
    """What compiling a CUDA kernel gave, and what is launched for a task, or why its contract refuses that."""
    console = open_console()
    _print_stage(console, build)
    for kernel in build.kernels:
        tensor = f"; {', '.join(kernel.tensor_instructions)}" if kernel.tensor_instructions else ""
        console.print(
            f"         {kernel.name}: {kernel.registers} registers, {counted(kernel.spill_bytes, 'byte')} spilled,"
            f" {kernel.shared_bytes} bytes of static shared memory, {kernel.instructions} instructions{tensor}"
        )
    for warning in build.warnings:
        console.print(f"         {warning}")
    if refused:
        console.print(f"contract refused: {refused}")
    for launch in plan.launches if plan else ():
        console.print(
            f"launch   {launch.kernel}: {_times(launch.grid)} blocks of {_times(launch.block)} threads,"
            f" {launch.shared_bytes} bytes of dynamic shared memory"
            + (f", clusters of {_times(launch.cluster)}" if math.prod(launch.cluster) > 1 else "")
        )


def build_json(build: Build, plan: Plan | None, refused: str) -> str:
    """The same as JSON."""
    fields = {"build": json.loads(to_json(build)), "plan": plan and json.loads(to_json(plan)), "refused": refused}
    return json.dumps(fields, indent=2)


def _times(sizes: Sequence[int]) -> str:
    """Sizes as they multiply, ones at the end left out."""
    last = max((i for i, size in enumerate(sizes) if size > 1), default=0)
    return " x ".join(map(str, sizes[: last + 1]))


def print_known(task: Task, trials: list[Trial], archive: Place) -> None:
    """The best kernels of a shape and how they were measured, by machine; what may be long ends a line."""
    console = open_console()
    console.print(f"{task} in {archive}")
    head = ("kernel", "protocol", "time", "speedup [95 %]")
    rows = []
    for trial in trials:
        assert trial.timing and trial.timing.candidate and trial.timing.speedup
        times = _time(trial.timing.candidate), _ratio(trial.timing.speedup)
        rows.append((trial, (trial.candidate.id, trial.protocol, *times)))
    widths = [max(map(len, column)) for column in zip(head, *(cells for _, cells in rows), strict=True)]
    for machine in dict.fromkeys(trial.machine for trial in trials):
        console.print(f"on {machine}:")
        console.print("  " + _aligned(head, widths))
        for trial, cells in rows:
            if trial.machine == machine and trial.timing:
                when = trial.created[:16].replace("T", " ")
                console.print("  " + _aligned(cells, widths))
                console.print(f"    against {trial.timing.reference}; {when} UTC, {_origin(trial.candidate)}")
    for name in dict.fromkeys(trial.protocol for trial, _ in rows):
        console.print(f"{name}: {PROTOCOLS.get(name, '')}")
    best = trials[0]
    reports = [trial for trial in trials if trial.candidate.id == best.candidate.id and trial.protocol in REPORTED]
    here = [trial for trial in reports if trial.machine == best.machine]
    if why := why_no_win(sorted(here, key=lambda trial: REPORTED.index(trial.protocol))):
        console.print(f"no kernel wins: {why}" if reports else f"no winner is confirmed: {why}")
    family = next((f for f in all_families() if f.name == best.candidate.family), None)
    meanings = {choice.name: choice.help for choice in family.choices} if family else {}
    if family:
        console.print("the first:")
        console.print(f"  family {family.name}")
    for name, value in best.candidate.schedule:
        console.print(f"  {name} {value}: {meanings.get(name, '')}")
    where = "" if archive == default_archive() else f" --archive {archive}"
    console.print(f"source of the first: cuda-l2 show {task} --source{where}")


def _origin(candidate: Candidate) -> str:
    return "a default schedule" if candidate.proposer == "default" else f"proposed by {candidate.proposer}"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def result_json(result: "Result") -> str:
    """One JSON object: the winner's trials by protocol, the search's counts, the path of the source."""
    return json.dumps(
        {
            "gemm": str(result.task),
            "reports": {name: _plain(trial) for name, trial in result.reports.items()},
            "best": _plain(result.best) if result.best else None,
            "wins": result.wins,
            "why_no_win": result.why_no_win,
            "handed_out": result.handed_out or None,
            **{name: getattr(result.search, name) for name in SEARCHED},
            "policy": result.search.summary,
            "source": str(result.source_path) if result.source_path else None,
            "environment": result.best.environment if result.best else {},
        }
    )


def trials_json(trials: list[Trial]) -> str:
    return json.dumps([_plain(trial) for trial in trials], indent=1)


def _plain(trial: Trial) -> object:
    """A trial as plain JSON values: what is not a number becomes null, which every reader takes."""
    return json.loads(to_json(trial), parse_constant=lambda name: None)


def open_console(width: int = CONSOLE_WIDTH) -> Console:
    """Standard output for tables. width: where it is no terminal, in characters."""
    # no markup: a compiler's words hold square brackets
    make = partial(Console, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console = make()
    return console if console.is_terminal else make(width=width)


def _arm(timing: Timing, name: str) -> Arm | None:
    return next((arm for arm in timing.baselines if arm.name == name), None)


def _time(arm: Arm | None) -> str:
    if arm is None:
        return "-"
    us = arm.latency_us.estimate
    return f"{us:.1f} us" if us < 1e3 else f"{us / 1e3:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def _ratio(ratio: Interval) -> str:
    if math.isinf(ratio.low):
        return f"{ratio.estimate:.2f}x"
    return f"{ratio.estimate:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]"


def _review(review: Review) -> str:
    """What a second look at a jump found; a checker's opinion is somebody else's words."""
    measured = ", ".join(_ratio(speedup) for speedup in review.speedups)
    lines = [f"review   {review.status}: {review.jump}; measured {measured}"]
    lines += [f"         elsewhere: {review.elsewhere}"] if review.elsewhere else []
    lines += [f"         {review.checker} says: {plain(review.opinion)}"] if review.checker else []
    return "\n".join(lines)


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
