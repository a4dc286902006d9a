"""cuda-l2 check: judge a kernel of one's own."""

import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

from cyclopts import Parameter

from cuda_l2 import contract, tasks
from cuda_l2.commands._options import read_source, require_target, tell
from cuda_l2.records import Build, BuildStatus, Candidate, Task, TimingStatus, Trial
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import is_there
from cuda_l2.tasks.optional import load_kernelbench


@Parameter(name="*", group="KernelBench")
@dataclass(frozen=True)
class AuditSettings:
    """How candidates in KernelBench's style are judged."""

    pytorch: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """An operator of PyTorch that the candidate may call, as in linear, or torch.compile; several times. all: any."""
    one_shape: Annotated[bool, Parameter(negative=())] = False
    """Judge at the shape shown alone, as published results often are meant."""
    own_weights: Annotated[bool, Parameter(negative=())] = False
    """Leave its weights as its seed makes them, as KernelBench does, instead of setting and changing them by name."""
    eager: Annotated[bool, Parameter(negative=())] = False
    """Time against the reference in eager mode alone: torch.compile takes half a minute of a judgement."""
    as_written: Annotated[bool, Parameter(negative=())] = False
    """Keep sizes as written, however long that takes, instead of halving them until they suit the machine."""


@Parameter(name="*")
@dataclass(frozen=True)
class CheckSettings:
    """How a kernel is judged, on which machine and on whose task."""

    protocol: str = "offline"
    """offline, server, paper, or search; on a GPU also rotating and server-10ms."""
    target: str = "auto"
    """The machine to judge it on: cpu, cuda, or auto for the one its contract names."""
    full: Annotated[bool, Parameter(negative=())] = False
    """Also run the checks that are too slow for every candidate of a search: sanitizers and stress builds, for CUDA
    kernels."""
    weights_ahead: Annotated[bool, Parameter(negative=())] = False
    """The kernel may declare inputs constant (docs/contract.md). Its time is then no other kernel's bar."""
    compile_only: str | None = None
    """An architecture as in sm_90a: build a CUDA kernel for it and say what is launched. Needs no GPU, judges
    nothing."""
    kernelbench: Path | None = None
    """Folder of a KernelBench checkout: judge on its file TASK, which is named as kernelbench/level1/19_ReLU, or
    kernelbench/level1/19; a Python file by its class ModelNew, any other under the launch contract. Folders of other
    collections in this format serve as well."""
    reference: Path | None = None
    """A file in KernelBench's format, with Model, get_inputs and get_init_inputs: judge on it, without a checkout."""
    audit: AuditSettings = AuditSettings()
    json: Annotated[bool, Parameter(negative=())] = False
    """Print the trial as JSON."""


def command(file: Path, task: str = "", /, *, settings: CheckSettings = CheckSettings()) -> None:
    """Build, verify and time a kernel: the verdict with the failing element, the timing, the reward.

    Exits with 1 where the kernel is not correct, or other work left no quiet in which to time it.

    Args:
        file: C or CUDA source that follows the launch contract in docs/contract.md, for tasks also docs/tasks.md.
        task: What to judge it on: a shape as in 512x512x512, or another task as in softmax:rows=64,columns=1000. Not
            with --reference.
    """
    if bool(task) == bool(settings.reference) or (settings.kernelbench and settings.reference):
        raise UserError("give what to judge it on: a task, a task and --kernelbench, or --reference and no task")
    if not is_there(file) and is_there(Path(task)) and Path(task).is_file():
        raise UserError(f"there is no file {file}: the kernel's file comes first, as in cuda-l2 check {task} {file}")
    foreign = settings.kernelbench or settings.reference
    module = foreign is not None and file.suffix == ".py"
    text = read_source(file, contracted=not module)
    wanted = partial(_wanted, task, settings)
    if settings.compile_only is not None:
        _compile(text, wanted("cuda"), settings.compile_only, settings.json)
    if module:
        trial = _audit(text, _entry(task, settings), settings)
    elif settings.audit != AuditSettings():
        raise UserError(
            "--pytorch, --one-shape, --own-weights, --eager and --as-written are for a ModelNew that is judged with"
            " --kernelbench or --reference"
        )
    else:
        trial = _judge(text, wanted, settings)

    from cuda_l2.report.tables import print_trial, trials_json

    if settings.json:
        print(trials_json([trial]))
    else:
        print_trial(trial)
    sys.exit(0 if trial.timing and trial.timing.status is TimingStatus.MEASURED else 1)


def _compile(text: str, wanted: Task, arch: str, json: bool) -> NoReturn:
    """Build for an architecture and plan the launches; exits with 1 where either is refused."""
    from cuda_l2.build.cuda import build_all
    from cuda_l2.machine.cuda.target import compile_only
    from cuda_l2.report.tables import build_json, print_build

    if not re.fullmatch(r"sm_\d{2,3}a?", arch):
        raise UserError(f"{arch!r} is no architecture: give one as in sm_80 or sm_90a")
    with contextlib.suppress(contract.ContractError):  # what is wrong with it the build says
        if isinstance(contract.parse(text), contract.CpuContract):
            raise UserError('--compile-only is for CUDA kernels, and this one says target = "cpu"')
    target = compile_only(arch)
    (build,) = build_all([Candidate(text)], target)
    plan, refused = None, ""
    try:
        plan = contract.plan_cuda(text, wanted, target.sms)
    except contract.ContractError as error:
        refused = str(error)
    if json:
        print(build_json(build, plan, refused))
    else:
        print_build(build, plan, refused)
    sys.exit(0 if build.status is BuildStatus.BUILT and plan else 1)


def _wanted(task: str, settings: CheckSettings, target: str) -> Task:
    """The task to judge a kernel on. target: cpu or cuda."""
    if settings.reference is None:
        return tasks.parse(task, target, settings.kernelbench)
    known, entry = load_kernelbench("checkout"), load_kernelbench("files").entry_of(settings.reference)
    wanted: Task = known.admit(entry, known.effort_for(gpu=target == "cuda"))
    return wanted


def _entry(task: str, settings: CheckSettings) -> Any:
    """The file to judge a ModelNew on."""
    files = load_kernelbench("files")
    if settings.reference:
        return files.entry_of(settings.reference)
    name, _, sizes = task.partition(":")
    if sizes:
        raise UserError(f"a ModelNew is judged at its file's own sizes, or halved for this machine: leave out :{sizes}")
    return files.find_entry(settings.kernelbench, name)


def _audit(text: str, entry: Any, settings: CheckSettings) -> Trial:
    from cuda_l2.machine import gpu_present
    from cuda_l2.report.live import Stages

    target, audit = settings.target, settings.audit
    require_target(target)
    gpu = target == "cuda" or (target == "auto" and bool(re.search("cuda|triton", text)) and gpu_present())
    effort = load_kernelbench("checkout").effort_for(gpu=gpu, as_written=audit.as_written)
    auditor = load_kernelbench("auditor").Auditor(entry, effort, compiled=not audit.eager)
    with Stages(entry.name) as stages, auditor:
        trial: Trial = auditor.judge(
            Candidate(text),
            settings.protocol,
            allowed=audit.pytorch,
            one_shape=audit.one_shape,
            own_weights=audit.own_weights,
            begins=stages.stage,
        )
    return trial


def _judge(text: str, task_for: Callable[[str], Task], settings: CheckSettings) -> Trial:
    """task_for: the task on cpu or cuda."""
    from cuda_l2.evaluator import evaluate
    from cuda_l2.machine import chosen
    from cuda_l2.measure.protocols import CPU_PROTOCOLS, CUDA_PROTOCOLS
    from cuda_l2.report.live import Stages

    target = settings.target
    if target == "auto":  # where it names none the build says what is wrong with it
        target = contract.target_of(text) or target
    kind = chosen(target)
    protocols = CUDA_PROTOCOLS if kind == "cuda" else CPU_PROTOCOLS
    if settings.protocol not in protocols:
        raise UserError(f"there is no protocol {settings.protocol!r}; choose from {', '.join(protocols)}")
    if settings.full and kind == "cpu":
        tell("--full adds nothing here: sanitizers and stress builds are for CUDA kernels")
    wanted = task_for(kind)
    try:
        (contract.parse_cuda if kind == "cuda" else contract.parse_cpu)(text)
    except contract.ContractError as error:
        return _refused(text, wanted, str(error), settings.protocol, kind)
    with Stages(wanted) as stages:
        stages.stage("judging", always=False)
        return evaluate(
            text,
            wanted,
            protocol=settings.protocol,
            target=target,
            full=settings.full,
            weights_ahead=settings.weights_ahead,
        )


def _refused(text: str, wanted: Task, reason: str, protocol: str, kind: str) -> Trial:
    """The trial of a kernel that its contract alone refuses: nothing that takes time to load or start is needed."""
    from cuda_l2.machine import detect
    from cuda_l2.reward import reward
    from cuda_l2.system.values import now

    candidate, machine = Candidate(text), detect(kind).machine
    build = Build(candidate.id, BuildStatus.REFUSED, reason)
    return Trial(wanted, candidate, machine, protocol, build, reward=reward(build.status, None, None, 0), created=now())
