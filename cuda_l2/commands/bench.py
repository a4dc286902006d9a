"""cuda-l2 bench: the README's table remade, arms over a grid of shapes, many tasks, or a model's layers."""

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cuda_l2.commands._options import (
    end_interrupted,
    part,
    require_cuda_packages,
    require_default,
    require_policy,
    require_target,
    require_writable,
    tell,
)
from cuda_l2.llm._base import is_model
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.measure.baselines._base import product_baselines
from cuda_l2.records import Gemm
from cuda_l2.runs.results import CSV, ENVIRONMENT, RESULTS, SUMMARY, ResultsFile, read_header, set_aside
from cuda_l2.runs.settings import MODEL_ARMS, DecoderSettings, SweepSettings
from cuda_l2.settings import LANGUAGE_MODELS
from cuda_l2.system import variables
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported, write_text
from cuda_l2.system.place import file_of
from cuda_l2.system.text import counted
from cuda_l2.system.values import listed, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cuda_l2.records import Operation
    from cuda_l2.rigs import Rig
    from cuda_l2.runs.sweep import Sweep
    from cuda_l2.search import Progress

SHAPES = ("256x256x256", "512x512x512", "1024x1024x1024", "64x4096x4096:tn", "2048x128x2048", "1000x333x777")
WITH_TASKS = ("tasks", "kernelbench", "trials", "model")
"""Settings for tasks, beside those."""
WITH_MODEL = ("decoder", "arms", "seed", "out", "target")
"""Settings for a model's layers."""
SEARCHED = ("budget", "policy", "seed", "archive", "out", "target")
"""Settings that few shapes take, and tasks; all others go with a grid, but for `fresh`, which shapes take too."""
BOTH = "offline,server"
"""Protocols under which few shapes are reported."""


TASKS = Parameter(group="Over tasks")
LAYERS = Parameter(name="*", group="A model's layers", negative=())


@Parameter(name="*", negative=())
@dataclass(frozen=True)
class BenchSettings(SweepSettings):
    """How to run the benchmark."""

    tasks: str | None = None
    """Tasks that are no matrix products: all, served (those that a kernel family serves on this machine), sample (of
    these some of each kind), groups, or tasks, as in reduction,gelu:rows=64,columns=512. Sizes left out are those for
    the machine."""
    kernelbench: Annotated[Path | None, TASKS] = None
    """Folder of a KernelBench checkout, for tasks as kernelbench/level1/19; kernelbench/level1 is all of a level,
    kernelbench every file."""
    trials: Annotated[int | None, TASKS] = None
    """At most so many candidates a task."""
    model: Annotated[ModelSettings, LANGUAGE_MODELS] = ModelSettings()
    decoder: Annotated[DecoderSettings, LAYERS] = DecoderSettings()


def command(shapes: list[str] | None = None, /, *, settings: BenchSettings = BenchSettings()) -> None:
    """Search each shape, report the winners, print the table; or, with --grid or --sample, run arms over many shapes.

    With --tasks, search each task and tell mean, median, 75 %, largest speedup, what works and what is faster, by group
    and baseline: tasks.md and tasks.csv.

    With --model, tune a decoder's shapes and time its layers on a GPU, without and with tuned kernels: summary.md,
    table.csv and environment.json.

    A grid writes results.jsonl, from which an interrupted run goes on, then table.csv, table.parquet, summary.md and
    environment.json.

    Args:
        shapes: Six by default, small and large, square and not.
    """
    require_target(settings.target)
    require_policy(settings.policy)
    if settings.decoder.model is not None:
        if shapes or settings.tasks is not None:
            raise UserError("give shapes, --tasks or --model, not several of them")
        _require_no_tasks(settings)
        require_default(settings, (*WITH_MODEL, *WITH_TASKS), "does not go with --model")
        _run_model(settings, settings.decoder.model)
        return
    require_default(settings.decoder, (), "goes with --model")
    if settings.tasks is not None:
        if shapes:
            raise UserError("give shapes or --tasks, not both")
        require_default(settings, (*SEARCHED, *WITH_TASKS), "does not go with --tasks")
        spending = (settings.model.tokens, settings.model.money, settings.model.model_seconds)
        if is_model(settings.policy) and spending == (None, None, None):
            raise UserError("over many tasks a language model needs a budget: --tokens, --money or --model-seconds")
        _run_tasks(settings)
        return
    _require_no_tasks(settings)
    if is_model(settings.policy):
        raise UserError(f"over shapes use `cuda-l2 optimize --policy {settings.policy}`; bench asks models for --tasks")
    few = settings.grid is None and settings.sample is None
    if shapes and not few:
        raise UserError(f"give shapes alone or as --grid {','.join(shapes)}, not beside --grid or --sample")
    _run_grid(_searched(shapes or SHAPES, settings) if few else settings, each=few)


def _searched(shapes: "Sequence[str]", settings: BenchSettings) -> BenchSettings:
    """Few shapes as a grid: each is searched and reported under both protocols, in a folder of its own."""
    require_default(settings, (*SEARCHED, "fresh"), "goes with --grid or --sample")
    grid = ",".join(str(Gemm.parse(shape)) for shape in shapes)
    out = settings.out or Path("bench-cpu")
    archive, budget = settings.archive or out / "archive.db", settings.budget or "60s"
    return replace(settings, grid=grid, out=out, archive=archive, budget=budget, protocols=BOTH)


def _require_no_tasks(settings: BenchSettings) -> None:
    for name in WITH_TASKS:
        if getattr(settings, name) != getattr(BenchSettings, name):
            option = "an option of language models" if name == "model" else f"--{name}"
            raise UserError(f"{option} goes with --tasks")


def _run_tasks(settings: BenchSettings) -> None:
    from cuda_l2.machine import detect
    from cuda_l2.optimizer import Optimizer
    from cuda_l2.report.live import LiveProgress
    from cuda_l2.report.task_figures import markdown, table
    from cuda_l2.runs.task_bench import read_tasks, run

    assert settings.tasks is not None
    wanted = read_tasks(settings.tasks, detect(settings.target), settings.kernelbench)
    budget_s = seconds(settings.budget or "20s")
    out = settings.out or Path("bench-tasks")
    require_writable(out / "tasks.md")
    archive, trials, model = settings.archive or out / "archive.db", settings.trials, settings.model
    searched = settings.search(budget_s, archive=archive, protocol="offline", trials=trials, model=model)
    with Optimizer(searched) as optimizer, contextlib.ExitStack() as shown:
        tell(
            f"{counted(len(wanted), 'task')}, {budget_s:g} s of search each; results go to {out};"
            f" what {archive} holds a report of is taken from there"
        )

        def on_task(task: "Operation") -> "tuple[Callable[[Progress], None], Callable[[str], None]]":
            shown.close()  # the task before
            live = shown.enter_context(LiveProgress(task, most_s=optimizer.plan(task).most_s, beside=file_of(archive)))
            return live.progress, live.stage

        results = []
        for result in run(optimizer, wanted, on_task):
            results.append(result)
            write_text(out / "tasks.md", markdown(results))
            write_text(out / "tasks.csv", table(results))
    print(markdown(results))
    if len(results) < len(wanted):
        end_interrupted()


def _run_model(settings: BenchSettings, model: str) -> None:
    arms, out = listed(settings.arms) or MODEL_ARMS[:4], settings.out or Path("bench-model")
    unknown = [arm for arm in arms if arm not in MODEL_ARMS]
    if unknown:
        raise UserError(f"there is no arm {unknown[0]!r} of a model; choose from {', '.join(MODEL_ARMS)}")
    if settings.target == "cpu":
        raise UserError("a model's layers are timed on a GPU alone")
    transformers = imported("transformers", "a model's layers need", "llm")

    from cuda_l2.runs.decoder import Decoder, cases_of, config_of, shapes

    config, cases = config_of(model, settings.decoder.layers), cases_of(settings.decoder)
    require_cuda_packages()

    import torch

    import cuda_l2
    from cuda_l2.machine.cuda.driver import bus_id
    from cuda_l2.machine.cuda.target import detect
    from cuda_l2.runs.model_bench import WITH_AHEAD, Compared, rows_csv, run, table, tune_missing
    from cuda_l2.system.lock import machine_lock

    target = detect()
    require_writable(out / CSV)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda_l2": cuda_l2.__version__}
    environment = target.environment() | versions | variables.recorded(own_process=True)
    described = {"machine": target.machine, "environment": environment, "settings": asdict(settings.decoder)}
    write_text(out / ENVIRONMENT, json.dumps(described, indent=1) + "\n")
    name = f"{model}, merged" if settings.decoder.merged else model
    found: list[Compared] = []
    with machine_lock(bus_id()):
        decoder = Decoder(config, "cuda", merged=settings.decoder.merged)
        tell(f"{counted(decoder.layers, 'layer')} of {name}, {counted(len(cases), 'step')}; results go to {out}")
        wanted = shapes(decoder, cases)
        for ahead in {False, any(arm in WITH_AHEAD for arm in arms)}:
            tune_missing(
                wanted, lambda choice: tell(f"tuned {choice.shape}: {choice.kernel or 'torch'}"), weights_ahead=ahead
            )
        for rows in run(decoder, cases, arms, tell, seed=settings.seed):
            found += rows
            write_text(out / CSV, rows_csv(name, decoder.layers, found))
            write_text(out / SUMMARY, table(name, found) + "\n")
    print(table(name, found))


def _run_grid(settings: BenchSettings, *, each: bool) -> None:
    """each: with a table of every shape."""
    budget_s = settings.budget_s
    if settings.seed < 0:
        raise UserError(f"the seed must not be negative, as {settings.seed} is")
    if settings.library and (settings.baselines_only or budget_s):
        raise UserError(
            "--library times the kernels of a table: it goes neither with --baselines-only nor with --budget"
        )
    settings.require_protocols()
    gemms = settings.gemms()
    own = _own(gemms, settings)
    out = settings.out or Path("bench-grid")
    require_writable(out / RESULTS)
    if settings.workers and _by_workers(settings, out, gemms):
        return

    from cuda_l2.report.live import GridProgress
    from cuda_l2.runs.library_run import Library, first_builds
    from cuda_l2.runs.parts import take_over

    library = Library(settings.library) if settings.library else None
    builders = first_builds(library, own) if library and settings.target != "cpu" else None
    with contextlib.ExitStack() as held:
        if builders:
            held.callback(builders.close)

        from cuda_l2.runs.sweep import Sweep

        sweep = held.enter_context(Sweep(settings, library, builders))
        take = held.enter_context(_taking(settings.taken, gemms))
        if settings.fresh:
            set_aside(out)
        with ResultsFile(out / RESULTS, sweep.header(gemms)) as results:
            for folder in settings.also:
                results.take_over(folder / RESULTS)
            if settings.workers:
                take_over(out, RESULTS, results.take_over)
            pending = results.pending(own, settings.protocol_names)
            tell(
                f"{_kernels(settings, budget_s)} on {counted(len(own), 'shape')},"
                f" {len(own) - len(pending)} of them done before; under {', '.join(settings.protocol_names)};"
                f" {_baselines(sweep.rig, settings.protocol_names)}; results go to {out}"
                f"{_least_time(sweep, pending, results)}"
            )
            finished = False
            try:
                with GridProgress(len(own), len(own) - len(pending), beside=results.path) as line:
                    finished = sweep.run(pending, results, line.stage, line.done, take)
            finally:  # also where an error ends the run
                sweep.rig.keep_choices(gemms)
                if settings.taken is None:  # else the command that shares the shapes writes them
                    _write_tables(out, results, gemms, settings, each=each)
        if finished and each and not any(record.timing for record in results.records):
            raise UserError(f"none of {counted(len(gemms), 'shape')} was measured")
        if not finished:
            end_interrupted()


def _own(gemms: "Sequence[Gemm]", settings: BenchSettings) -> "Sequence[Gemm]":
    """The shapes that a command measures, in its order.

    Where commands take them, all, from its part on: so that they do not build the same kernels at the same time.
    """
    number, parts = part(settings.part)
    first, end = (len(gemms) * bound // parts for bound in (number - 1, number))
    if settings.taken is None:
        return gemms[first:end]
    while first and gemms[first].sizes == gemms[first - 1].sizes:  # both layouts are one command's
        first -= 1
    return [*gemms[first:], *gemms[:first]]


@contextlib.contextmanager
def _taking(file: Path | None, gemms: "Sequence[Gemm]") -> "Iterator[Callable[[Gemm], bool]]":
    """Whether a shape is this command's to measure, among those that share a file; layouts of a size go together."""
    if file is None:
        yield lambda gemm: True
        return
    from cuda_l2.runs.parts import Taken

    numbers = {sizes: number for number, sizes in enumerate(dict.fromkeys(gemm.sizes for gemm in gemms))}
    with Taken(file) as taken:
        yield lambda gemm: taken.take(numbers[gemm.sizes])
        taken.done()


def _load_tables() -> None:
    """Import what tables need: a second or two, while others measure anyway."""
    from cuda_l2.report import bench, grid_summary  # noqa: F401
    from cuda_l2.report.grid import load

    load()


def _write_tables(
    out: Path, results: ResultsFile, gemms: "Sequence[Gemm]", settings: BenchSettings, *, each: bool
) -> None:
    """Write and print what a grid gave. each: with a table of every shape."""
    from cuda_l2.report.bench import markdown, print_shapes
    from cuda_l2.report.grid import KEPT, write_tables
    from cuda_l2.report.grid_summary import summary

    table = markdown(results.header, results.records) if each else ""
    text = table + summary(results.header, results.records)
    write_text(out / SUMMARY, text, KEPT)
    missing = write_tables(out, results.header, results.records)
    if each:
        print_shapes(results.records)
    else:
        print(text)
    measured = len(gemms) - len(results.pending(gemms, settings.protocol_names))
    print(f"{measured} of {counted(len(gemms), 'shape')} measured; tables are in {out}")
    if missing:
        tell(missing)


def _by_workers(settings: BenchSettings, out: Path, gemms: "Sequence[Gemm]") -> bool:
    """Have every GPU measure some shapes of a grid; whether all are measured, and the tables written."""
    from cuda_l2.runs import on_ray, parts

    if settings.part != BenchSettings.part or settings.taken or settings.also or settings.fresh:
        raise UserError(
            "--workers gives each GPU its shapes, and goes on from what is there: leave --part, --taken, --also and"
            " --fresh out"
        )

    def take_over(part: Path) -> bool:
        header = read_header(part)
        if header:
            with ResultsFile(out / RESULTS, header) as results:
                results.take_over(part)
        return header is not None

    if not on_ray.is_ray(settings.workers):  # whose nodes may be of another kind
        parts.take_over(out, RESULTS, take_over)  # what a run that was interrupted has left
    if not parts.share(settings.workers, out, RESULTS, tell, by_item=True, meanwhile=_load_tables):
        return False
    parts.take_over(out, RESULTS, take_over)
    header = read_header(out / RESULTS)
    assert header  # the parts' figures are under it
    with ResultsFile(out / RESULTS, header) as results:
        if results.pending(gemms, settings.protocol_names):
            return False
        _write_tables(out, results, gemms, settings, each=False)
    return True


def _kernels(settings: BenchSettings, budget_s: float) -> str:
    """What is timed over a grid beside the baselines, in a few words."""
    if settings.baselines_only:
        return "baselines alone"
    if settings.library:
        return f"kernels of {settings.library}"
    return f"kernels of {budget_s:g} s of search" if budget_s else "the best kernels known, or default ones,"


def _least_time(sweep: "Sweep", pending: list[Gemm], results: ResultsFile) -> str:
    """How long a grid takes on a CPU; on a GPU setting up costs more than launches."""
    from cuda_l2.report.live import duration

    if sweep.rig.target.name != "cpu" or not pending:
        return ""
    least_s, feasible = sweep.least_s(pending, results)
    left_out = len(pending) - feasible
    said = f"; left out: {counted(left_out, 'shape')} that need more memory than is free" if left_out else ""
    return f"; this takes at least {duration(least_s)}{said}"


def _baselines(rig: "Rig", protocols: "Sequence[str]") -> str:
    """The baselines that reports under these protocols time, where a shape has them; names hold commas."""
    known = product_baselines(rig.target.name)
    names = dict.fromkeys(each.name for protocol in protocols for each in rig.request.reported(known, protocol))
    return f"{counted(len(names), 'baseline')} ({'; '.join(names)})"
