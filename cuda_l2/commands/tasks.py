"""cuda-l2 tasks: what else than matrix products there is to work on."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2.commands._options import require_default, require_target, require_writable
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import line_of
from cuda_l2.system.values import seconds


@Parameter(name="*")
@dataclass(frozen=True)
class CheckoutSettings:
    """How a KernelBench checkout is tried."""

    level: Annotated[tuple[int, ...], Parameter(negative=())] = ()
    """Which levels, all that the folder has by default; give it several times."""
    timeout: str = "120s"
    """What one file may take."""
    memory: float | None = None
    """GiB that verifying one file may take: 8 for a CPU, 64 for a GPU, unless told."""
    target: str = "cpu"
    """Where references run: cpu, cuda, or auto for a GPU where there is one."""
    as_written: Annotated[bool, Parameter(negative=())] = False
    """Keep sizes as written, however long they take, instead of halving them until they suit the target."""
    out: Path | None = None
    """Write what was found to this file, one JSON line a task."""


def command(
    *task: str,
    kernelbench: Path | None = None,
    settings: CheckoutSettings = CheckoutSettings(),
    baselines: Annotated[bool, Parameter(negative=())] = False,
    protocol: str = "offline",
    seed: int = 0,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """List tasks of our own, show some in full, or try the files of a KernelBench checkout.

    Files of a checkout are run in a sandboxed process and refused with a reason where they cannot be tasks.

    Args:
        task: As in softmax or softmax:rows=64,columns=1000:float16; all are listed where there is none.
        kernelbench: Folder of a checkout, or of another collection in its format: docs/tasks.md says where files are
            looked for.
        baselines: Also time PyTorch, eager and compiled, on this machine's CPU.
        protocol: Of the timing: offline, server, paper, or search.
        seed: Of inputs.
        json: Print JSON, one line a task.
    """
    if task and kernelbench:
        raise UserError("give tasks or a checkout, not both")
    if baselines and not task:
        raise UserError("--baselines needs the tasks to time")
    if not kernelbench:
        require_default(settings, (), "goes with --kernelbench")
    if seed < 0:
        raise UserError(f"the seed must not be negative, as {seed} is")
    if kernelbench:
        _checkout(kernelbench, settings, seed, json)
    elif task:
        for text in task:
            _show(text, protocol if baselines else "", seed, json)
    else:
        _list(json)


def _list(json: bool) -> None:
    from cuda_l2.records import to_json
    from cuda_l2.report.tasks import print_own
    from cuda_l2.tasks._base import definitions

    known = definitions().values()
    if json:
        for definition in known:
            print(to_json(definition.task()))
    else:
        print_own(known)


def _show(text: str, protocol: str, seed: int, json: bool) -> None:
    from cuda_l2 import tasks
    from cuda_l2.measure.protocols import CPU_PROTOCOLS
    from cuda_l2.records import to_json
    from cuda_l2.report.tasks import print_task
    from cuda_l2.rigs import open_rig
    from cuda_l2.system.lock import machine_lock
    from cuda_l2.tasks._base import definition
    from cuda_l2.tasks.tolerance import bounds
    from cuda_l2.tasks.values import distributions

    task = tasks.parse(text)
    if task.product:
        raise UserError(f"{task} is a matrix product: `cuda-l2 optimize {task}`")
    known = definition(task.name)
    function = known.bind(dict(task.sizes))
    timing = None
    if protocol:
        if protocol not in CPU_PROTOCOLS:
            raise UserError(f"there is no protocol {protocol!r}; choose from {', '.join(CPU_PROTOCOLS)}")
        with open_rig("cpu") as rig, rig.open(task, seed) as bench, machine_lock():
            timing = bench.time_baselines(rig.protocols[protocol])
    if json:
        print(to_json(task) if timing is None else f'{{"task":{to_json(task)},"timing":{to_json(timing)}}}')
        return
    try:
        limits = {str(values): bounds(function, known.draw(task, seed, values)) for values in distributions(task.dtype)}
    except Exception as error:  # noqa: BLE001 - a reference is anybody's code
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise UserError(f"{task} does not fit in this machine's memory: {line_of(error)}") from None
        raise UserError(f"{task}: its reference fails, in its own type or in fp64: {line_of(error)}") from None
    print_task(task, limits, timing)


def _checkout(folder: Path, settings: CheckoutSettings, seed: int, json: bool) -> None:
    if settings.memory is not None and not settings.memory > 0:
        raise UserError(f"the memory must be positive, not {settings.memory}")
    timeout_s = seconds(settings.timeout, "--timeout")
    require_target(settings.target)
    if settings.out:
        require_writable(settings.out)

    from cuda_l2.machine import chosen, detect
    from cuda_l2.records import to_json
    from cuda_l2.tasks.optional import load_kernelbench

    checkout, files, opened, tables = map(load_kernelbench, ("checkout", "files", "opened", "tables"))
    gpu = chosen(settings.target) == "cuda"
    if gpu:
        detect("cuda")
        checkout.require_gpu_devices(str(folder))
    effort = dataclasses.replace(checkout.effort_for(gpu=gpu, as_written=settings.as_written), timeout_s=timeout_s)
    if settings.memory is not None:
        effort = dataclasses.replace(effort, memory_bytes=int(settings.memory * 2**30))
    listed = files.entries(folder, settings.level)
    found = []
    with settings.out.open("w") if settings.out else contextlib.nullcontext() as out:
        for entry in listed:
            examined = opened.examine(entry, effort, seed=seed)
            found.append(examined)
            line = to_json(examined)
            if out:
                print(line, file=out, flush=True)
            if json:
                print(line, flush=True)
            else:
                tables.print_examined(examined)
    if not json:
        tables.print_counts(found)
