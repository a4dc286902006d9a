"""Tasks as tables: our own, one of them in full, and what became of a KernelBench checkout's files."""

import collections
import math
import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from cuda_l2.kernelbench.examined import Examined, Readiness
from cuda_l2.measure.other_work import noticed
from cuda_l2.records import Arm, Operation, Timing
from cuda_l2.system.counted import counted
from cuda_l2.tasks._base import Definition
from cuda_l2.tasks.tolerance import Bounds


def print_own(known: Iterable[Definition]) -> None:
    """Every task of our own: group, sizes on the CPU and on a GPU, types."""
    table = Table(title_justify="left")
    for name in ("task", "group", "sizes on the CPU", "sizes on a GPU", "types"):
        table.add_column(name)
    count = 0
    for definition in known:
        cpu, gpu = (" ".join(f"{k}={v}" for k, v in sizes.items()) for sizes in (definition.cpu, definition.gpu))
        table.add_row(definition.name, definition.group, cpu, gpu, " ".join(definition.dtypes))
        count += 1
    console = _console()
    console.print(table)
    console.print(f"{counted(count, 'task')}; one in full: cuda-l2 tasks NAME, at other sizes NAME:rows=1000:float16")


def print_task(task: Operation, bounds: dict[str, tuple[Bounds, ...]], timing: Timing | None) -> None:
    """One task: its tensors, its tolerance on each distribution of values, its baselines."""
    console = _console()
    console.print(f"{task}: {_bytes(task.bytes)} to move" + (f", {task.flops:.3g} FLOP" if task.flops else ""))
    for kind, tensors in (("input", task.inputs), ("weight", task.weights), ("output", task.outputs)):
        for tensor in tensors:
            console.print(f"  {kind:<7} {tensor}")
    table = Table()
    for name in ("values", "output", "eager's largest error", "allowed", "eager's RMS error", "allowed"):
        table.add_column(name)
    for values, limits in bounds.items():
        for tensor, limit in zip(task.outputs, limits, strict=True):
            if limit.dtype.is_floating_point:
                errors = (limit.eager_max, limit.max_allowed, limit.eager_rms, limit.rms_allowed)
                table.add_row(values, tensor.name, *(f"{error:.3g}" for error in errors))
            else:
                share = float(limit.free.double().mean()) if limit.free.numel() else 0.0
                table.add_row(values, tensor.name, "equal", f"but {share:.2%} that rounding decides", "", "")
    console.print(table)
    if timing and timing.candidate:
        for arm in (timing.candidate, *timing.baselines):
            console.print(f"  {arm.name:<14} {_time(arm)} over {counted(arm.rounds, 'round')} ({timing.protocol})")
        for name, reason in timing.conditions.left_out.items():
            console.print(f"  {name:<14} left out: {reason}")
        if busy := noticed(timing.conditions):
            console.print(f"  {busy}")


def print_examined(found: Examined) -> None:
    """One line of a file that was tried."""
    if found.task is None:
        print(f"{found.status:<16} {found.name}: {found.reason}", flush=True)
        return
    tried = str(found.task).partition("@")[2].partition(":")[2]
    notes = [f"at {tried}"] if tried else []
    notes += [f"{found.seconds * 1e3:.3g} ms", counted(len(found.task.weights), "weight")]
    notes += [counted(len(found.parts), "part")] if found.parts else []
    notes += [f"not cut: {found.untraceable}"] if found.untraceable else []
    print(f"{found.status:<16} {found.name}: {', '.join(notes)}", flush=True)


def print_counts(found: Sequence[Examined]) -> None:
    """How many files of each level can be tasks, and what stands in the way of the others."""
    levels = sorted({each.name.split("/")[1] for each in found})
    counts = {level: collections.Counter(e.status for e in found if e.name.split("/")[1] == level) for level in levels}
    table = Table()
    for name in ("", *levels, "all"):
        table.add_column(name)
    for status in Readiness:
        if any(counts[level][status] for level in levels):
            numbers = [counts[level][status] for level in levels]
            table.add_row(str(status), *map(str, numbers), str(sum(numbers)))
    console = _console()
    console.print(table)
    ready = [each for each in found if each.status is Readiness.READY]
    parts = [len(each.parts) for each in ready if each.parts]
    smaller = sum(1 for each in ready if each.task and each.task.sizes)
    console.print(
        f"tasks: {len(ready)} of {counted(len(found), 'file')}"
        + (f", {smaller} of them tried at smaller sizes than written" if smaller else "")
        + (f"; {counted(sum(parts), 'part')} to fuse, {statistics.median(parts):g} in the middle file" if parts else "")
    )


def _console() -> Console:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, markup=False, soft_wrap=True, width=160)


def _bytes(count: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / 2**power:.3g} {unit}"
    return f"{count} bytes"


def _time(arm: Arm) -> str:
    interval = arm.latency_us
    known = f" [{interval.low:.1f}, {interval.high:.1f}]" if math.isfinite(interval.low) else ""
    return f"{interval.estimate:.1f} us{known}"
