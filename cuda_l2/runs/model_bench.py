"""A decoder's steps with torch's products and with tuned kernels: CUDA graphs, replayed in interleaved rounds."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from cuda_l2.library.deploy import dispatch
from cuda_l2.library.deploy.accelerate import accelerate
from cuda_l2.library.deploy.choices import Choice
from cuda_l2.library.deploy.entries import AHEAD, TUNED
from cuda_l2.library.deploy.inductor import max_autotune
from cuda_l2.library.deploy.native import native
from cuda_l2.library.deploy.tuning import tune
from cuda_l2.measure.sampler import Sampler
from cuda_l2.records import Gemm, Interval
from cuda_l2.runs.decoder import HEAD, Case, Decoder, Step
from cuda_l2.runs.settings import COMPILE, COMPILE_AHEAD, EAGER, FORCED, FORCED_AHEAD, MAX_AUTOTUNE
from cuda_l2.system.files import csv_text, markdown_table

WARM_UP, ROUNDS = 3, 31
CALLS = 2
"""Calls before a graph is captured; the first one compiles."""
QUEUE_CYCLES = 400_000
"""Cycles that the GPU waits before a sample, 0.2 ms, in which the host enqueues all of it."""
COLUMNS = (
    *("model", "layers", "phase", "batch", "tokens", "cached", "arm", "us", "ours_us", "ratio", "ratio_low"),
    *("ratio_high", "bar", "over_bar", "over_bar_low", "over_bar_high", "difference"),
)

Tensor = torch.Tensor
Side = tuple[str, bool]
"""An arm, and whether tuned kernels serve in it."""
WITH_AHEAD = (COMPILE_AHEAD, FORCED_AHEAD)
"""Arms whose weights are declared constant on the side with tuned kernels."""
PLAIN = {COMPILE_AHEAD: COMPILE, FORCED: MAX_AUTOTUNE, FORCED_AHEAD: MAX_AUTOTUNE}
"""Arms that differ from another one with tuned kernels alone, and that one: without them both are the same."""


@dataclass(frozen=True)
class Compared:
    """One arm of a case without and with tuned kernels; microseconds a layer, of the head a step."""

    case: Case
    arm: str
    us: float
    ours_us: float
    ratio: Interval  # time without over time with, paired by round
    bar: str  # the faster compiled arm without; empty where none was timed
    over_bar: Interval | None  # that arm's time without over this arm's with
    difference: float  # larger relative RMS difference of either result from plain eager's


class Timer(Protocol):
    """Times the sides of one case."""

    def prepare(self, side: Side, call: Callable[[], Tensor]) -> Tensor:
        """Make a side ready; the result of its call."""

    def sample(self, side: Side) -> float:
        """Microseconds of one call."""

    def close(self) -> None:
        """Free what the sides hold."""


class GraphTimer:
    """Times calls on the current CUDA device, each in a CUDA graph. restore: what comes before each call, untimed."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore, self._graphs = restore, dict[Side, torch.cuda.CUDAGraph]()
        self._memory = torch.cuda.graph_pool_handle()  # replays never overlap
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._mark = native().mark()

    def prepare(self, side: Side, call: Callable[[], Tensor]) -> Tensor:
        for _ in range(CALLS):
            self._restore()
            call()
        self._restore()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = call()
        self._graphs[side] = graph
        self.sample(side)
        return result.clone()

    def sample(self, side: Side) -> float:
        start, end = self._events
        self._restore()
        torch.cuda._sleep(QUEUE_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        self._graphs[side].replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def close(self) -> None:
        self._graphs.clear()
        native().release(self._mark)


def tune_missing(
    gemms: Sequence[Gemm], progress: Callable[[Choice], None], *, weights_ahead: bool = False
) -> list[Choice]:
    """Tune the shapes that have no choice on the current GPU; UserError where its kernels cannot be tuned.

    weights_ahead: for layers whose weights are declared constant.
    """
    known = dispatch.known(torch.cuda.current_device(), AHEAD if weights_ahead else TUNED)
    return tune([gemm for gemm in gemms if gemm not in known], weights_ahead=weights_ahead, progress=progress)


def run(
    decoder: Decoder,
    cases: Sequence[Case],
    arms: Sequence[str],
    told: Callable[[str], None],
    timer_of: Callable[[Callable[[], None]], Timer] = GraphTimer,
    seed: int = 0,
) -> Iterator[list[Compared]]:
    """Time each case in turn, without those that the GPU has too little memory for. told: is given a line a case."""
    for case in cases:
        try:
            found = compare(decoder, case, arms, timer_of, seed)
        except torch.OutOfMemoryError:
            told(f"{case} is left out: the GPU has too little memory for it")
            continue
        told(f"{case} is timed")
        yield found


def compare(
    decoder: Decoder,
    case: Case,
    arms: Sequence[str],
    timer_of: Callable[[Callable[[], None]], Timer] = GraphTimer,
    seed: int = 0,
) -> list[Compared]:
    """Time a case in each arm, without and with tuned kernels. timer_of: a timer, given what comes before each call."""
    step, sides = Step(decoder, case), list(dict.fromkeys(side for arm in arms for side in (_plain(arm), (arm, True))))
    calls = {side: functools.partial(step.run, _served(side, step, decoder)) for side in sides}
    timer, differences = timer_of(step.restore), dict[Side, float]()
    try:
        with torch.no_grad():
            expected = step.run(step.part(decoder.plain)).float()
            for side, call in calls.items():  # they live on: graphs read what compiled code holds
                accelerate(decoder.ours, weights_ahead=side[0] in WITH_AHEAD)
                error = (timer.prepare(side, call).float() - expected).square().mean() / expected.square().mean()
                differences[side] = error.sqrt().item()
            sampler = Sampler(timer.sample, np.random.default_rng(seed))
            for number in range(WARM_UP + ROUNDS):
                sampler.round(sides, kept=number >= WARM_UP)
    finally:
        timer.close()
        accelerate(decoder.ours)
        torch.compiler.reset()  # it keeps a limited number of compilations of one function
    samples, count = sampler.samples, 1 if case.phase == HEAD else decoder.layers
    bars = [(arm, False) for arm in (COMPILE, MAX_AUTOTUNE) if (arm, False) in sides]
    bar = min(bars, key=samples.median, default=None)
    return [
        Compared(
            case,
            arm,
            samples.median(_plain(arm)) / count,
            samples.median((arm, True)) / count,
            samples.ratio(_plain(arm), (arm, True)),
            bar[0] if bar else "",
            samples.ratio(bar, (arm, True)) if bar else None,
            max(differences[_plain(arm)], differences[arm, True]),
        )
        for arm in arms
    ]


def _plain(arm: str) -> Side:
    """The side without tuned kernels that an arm is compared with."""
    return PLAIN.get(arm, arm), False


def table(model: str, compared: Sequence[Compared]) -> str:
    """A Markdown row a case and arm."""
    rows = [
        (
            *(model, each.case.phase, each.case.batch, each.arm, f"{each.us:.1f}", f"{each.ours_us:.1f}"),
            *(_interval(each.ratio), each.bar, _interval(each.over_bar), f"{each.difference:.1e}"),
        )
        for each in compared
    ]
    over = "faster of compile and max-autotune", "over it [95 %]"
    head = ("model", "phase", "batch", "arm", "us", "ours, us", "ratio [95 %]", *over, "difference")
    return "\n".join(markdown_table(head, rows))


def rows_csv(model: str, layers: int, compared: Sequence[Compared]) -> str:
    """The same as CSV, with all digits that count."""
    return csv_text(COLUMNS, [_cells(model, layers, each) for each in compared])


def _served(side: Side, step: Step, decoder: Decoder) -> torch.nn.Module:
    """The module that a side calls."""
    arm, ours = side
    plain, accelerated = (step.part(model) for model in (decoder.plain, decoder.ours))
    module = accelerated if ours and arm != MAX_AUTOTUNE else plain
    if arm == EAGER:
        return module
    options = None
    if arm == MAX_AUTOTUNE and ours:
        options = max_autotune()
    elif arm in (MAX_AUTOTUNE, FORCED, FORCED_AHEAD):
        options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    compiled: torch.nn.Module = torch.compile(module, dynamic=False, options=options)  # type: ignore[assignment]
    return compiled


def _cells(model: str, layers: int, each: Compared) -> tuple[object, ...]:
    case, ratio, over = each.case, each.ratio, each.over_bar
    beyond = [f"{value:.4f}" for value in (over.estimate, over.low, over.high)] if over else [""] * 3
    return (
        *(model, layers, case.phase, case.batch, case.tokens, case.cached, each.arm),
        *(f"{each.us:.3f}", f"{each.ours_us:.3f}", f"{ratio.estimate:.4f}", f"{ratio.low:.4f}", f"{ratio.high:.4f}"),
        *(each.bar, *beyond, f"{each.difference:.2e}"),
    )


def _interval(ratio: Interval | None) -> str:
    return ratio.text(".3f") if ratio else "-"
