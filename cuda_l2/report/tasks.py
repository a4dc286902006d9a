"""Tasks as tables: our own, and one of them in full."""

from collections.abc import Iterable

from rich.table import Table

from cuda_l2.measure.other_work import noticed
from cuda_l2.records import Arm, Operation, Timing
from cuda_l2.report.tables import open_console
from cuda_l2.system.text import counted
from cuda_l2.tasks._base import Definition
from cuda_l2.tasks.tolerance import Bounds


def print_own(known: Iterable[Definition]) -> None:
    """Every task of our own: group, sizes on the CPU and on a GPU, types."""
    table = Table("task", "group", "sizes on the CPU", "sizes on a GPU", "types")
    for definition in known:
        cpu, gpu = (" ".join(f"{k}={v}" for k, v in sizes.items()) for sizes in (definition.cpu, definition.gpu))
        table.add_row(definition.name, definition.group, cpu, gpu, " ".join(definition.dtypes))
    console = open_console(160)
    console.print(table)
    console.print(
        f"{counted(table.row_count, 'task')}; one in full: cuda-l2 tasks NAME, at other sizes NAME:rows=1000:float16"
    )


def print_task(task: Operation, bounds: dict[str, tuple[Bounds, ...]], timing: Timing | None) -> None:
    """One task: its tensors, its tolerance on each distribution of values, its baselines."""
    console = open_console(160)
    console.print(f"{task}: {_bytes(task.bytes)} to move" + (f", {task.flops:.3g} FLOP" if task.flops else ""))
    for kind, tensors in (("input", task.inputs), ("weight", task.weights), ("output", task.outputs)):
        for tensor in tensors:
            console.print(f"  {kind:<7} {tensor}")
    table = Table("values", "output", "eager's largest error", "allowed", "eager's RMS error", "allowed")
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


def _bytes(count: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / 2**power:.3g} {unit}"
    return f"{count} bytes"


def _time(arm: Arm) -> str:
    return arm.latency_us.text(".1f", " us")
