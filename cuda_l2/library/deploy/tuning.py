"""Chooses the kernel for a shape on the user's GPU: every kernel of the pack and cuBLASLt's algorithms beside torch's.

First each kernel once, then the best with every launch, then the finalists and torch in interleaved rounds. Times are
replays of CUDA graphs of back-to-back launches whose B is another tensor each time, so that weights come from memory.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from cuda_l2 import contract
from cuda_l2.library.deploy import choices, dispatch, imported, vendor
from cuda_l2.library.deploy.accelerate import recorded
from cuda_l2.library.deploy.calls import READY, matmul
from cuda_l2.library.deploy.choices import Choice
from cuda_l2.library.deploy.entries import AHEAD, TUNED, key_of
from cuda_l2.library.deploy.native import native
from cuda_l2.library.deploy.pack import Pack, family_schedules
from cuda_l2.library.deploy.recipes import named, serving
from cuda_l2.library.table import family_of, schedule_of, schedule_text
from cuda_l2.measure.sampler import Sampler
from cuda_l2.records import Candidate, Gemm, Layout
from cuda_l2.system.errors import UserError

BEST, FINALISTS = 6, 3
"""Schedules that are timed with every launch, and kernels that are timed against torch."""
ALGORITHMS = 2
"""Algorithms of cuBLASLt that are timed against torch."""
LAUNCHES = 12
"""Ways to launch a kernel that are timed."""
CAPTURES, ROUNDS = 3, 7
"""Captures of the finalists' graphs, and timed rounds of each capture: some kernels are slow in one capture
and fast in the next, and serve only where they win in all."""
LEAST_GAIN = 1.01
"""A kernel serves where it surely gains this much: two in 300 that gained less were slower on another day."""
SLOW, LAUNCH_US = 1.5, 100.0
"""A kernel whose call takes this many times torch's time, and a launch's own, is not timed further."""
CALLS = 3
"""Calls of which the least time counts for that; the first may load code."""
REPLAY_US = 150.0
"""Aim for a replay; a graph has 1 to 64 launches, and at least one for each copy of B."""
COLD_CACHES = 2
"""Size of A, C and all copies of B together, in L2 caches."""
MAX_COPIES_BYTES = 1 << 30
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LIMIT = {"float16": 1e-3, "bfloat16": 8e-3}
"""Relative RMS difference from torch's product."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A kernel with one way to launch it; torch's own without."""

    kernel: str = choices.VENDOR
    candidate: Candidate | None = None


VENDOR_ARM = Arm()


class Timer(Protocol):
    """Times arms on one shape."""

    def prepare(self, arm: Arm) -> bool:
        """Make an arm ready; whether it runs here and computes the product."""

    def sample(self, arm: Arm) -> float:
        """Microseconds of one launch."""


def tune(
    subject: torch.nn.Module | Iterable[str | Gemm],
    *inputs: Any,
    cold: bool = True,
    one_stream: bool = False,
    weights_ahead: bool = False,
    progress: Callable[[Choice], None] = lambda choice: None,
    **named: Any,
) -> list[Choice]:
    """Choose the fastest kernel for each shape on the current GPU, keep the choices, and serve by them from now on.

    subject: shapes as in 16x4096x4096:tn:bf16, or a model, which is called once with the inputs, without gradients, to
    see which shapes come up. cold: B comes from memory, as weights do; else from the L2 cache. one_stream: also kernels
    whose blocks wait for one another; two of them at once on one GPU would wait for ever, so all products on the GPU
    must then be on one stream, or follow one another. weights_ahead: choose, also among kernels that read B ahead, for
    layers and products with weights_ahead=True alone; the choices of others stay.
    UserError where there is no GPU that the pack's kernels run on.
    """
    device, found = device_for_timing(), dispatch.required_pack()
    gemms = _recorded(subject, inputs, named) if isinstance(subject, torch.nn.Module) else _read(subject)
    rule, chosen = AHEAD if weights_ahead else TUNED, list[Choice]()
    place = dispatch.place_of(device, found, rule)
    known = choices.read(place)
    for gemm in gemms:
        if gemm in known and known[gemm].demoted:
            continue
        mark, timer = native().mark(), None
        try:
            timer = GraphTimer(gemm, device, found, cold=cold, rule=rule)
            algorithms = [Arm(vendor.FAMILY, made) for made in vendor.candidates(gemm, device, rounded=False)]
            choice = choose(gemm, candidates(gemm, device, found, one_stream, rule), timer, algorithms)
        except torch.OutOfMemoryError:
            dispatch.warn(f"{gemm} is not tuned: the GPU has too little memory left for it")
            continue
        finally:
            del timer  # its graphs end before what they work on
            native().release(mark)
        chosen.append(choice)
        progress(choice)
    try:
        choices.add(place, chosen)
    except UserError as error:
        dispatch.warn(f"what was tuned is not kept: {error}")
    dispatch.forget()
    return chosen


def adopt(name: str, gemms: Iterable[Gemm]) -> list[Choice]:
    """Time an imported kernel on shapes for which it was verified, and have it serve those where it wins."""
    device, found = device_for_timing(), dispatch.required_pack()
    made, own = imported.find(name)
    place = choices.place_of(device, found.identity)
    known, timed = choices.read(place), []
    for gemm in gemms:
        choice = choose(gemm, [iter([Arm(name, made)])], GraphTimer(gemm, device, own, cold=True))
        before = known.get(gemm)
        if choice.served and not (before and before.served and before.us <= choice.us):
            choices.add(place, [choice])
        timed.append(choice)
    dispatch.forget()
    return timed


def check(cold: bool = True) -> list[Choice]:
    """Time every shape that a kernel serves on the current GPU again; those that were demoted, for they lost."""
    device, found = device_for_timing(), dispatch.pack()
    all_lost = list[Choice]()
    for rule in (TUNED, AHEAD) if found else ():
        assert found
        place, lost = dispatch.place_of(device, found, rule), []
        for gemm, choice in choices.read(place).items():
            if not choice.served:
                continue
            made, holder = _source(choice, gemm, device, found)
            ways = [iter([Arm(choice.kernel, made)])] if made else []
            again = choose(gemm, ways, GraphTimer(gemm, device, holder, cold=cold, rule=rule))
            if not again.served:
                lost.append(replace(choice, us=again.us, vendor_us=again.vendor_us, demoted=True))
        choices.add(place, lost)
        all_lost += lost
    dispatch.forget()
    return all_lost


def choose(
    gemm: Gemm, schedules: Iterable[Iterator[Arm]], timer: Timer, algorithms: Iterable[Arm] = (), seed: int = 0
) -> Choice:
    """The choice for a shape. schedules: of each the ways to launch it, most promising first."""
    times = dict[Arm, float]()

    def best(arms: Iterable[Arm], count: int) -> list[Arm]:
        return sorted(arms, key=lambda arm: times[arm])[:count]

    def tried(arm: Arm) -> bool:
        if not timer.prepare(arm):
            return False
        timer.sample(arm)  # the first brings memory and clocks up
        times[arm] = timer.sample(arm)
        return True

    first = {arm: ways for ways in schedules if (arm := next(ways, None)) and tried(arm)}
    for arm in best(times, BEST):
        for other in itertools.islice(first[arm], LAUNCHES - 1):
            tried(other)
    finalists = best(times, FINALISTS)
    finalists += best([arm for arm in algorithms if tried(arm)], ALGORITHMS)
    if not finalists:
        return Choice(str(gemm))
    arms, sampler = (VENDOR_ARM, *finalists), Sampler(timer.sample, np.random.default_rng(seed))
    for _ in range(CAPTURES):
        if not all(timer.prepare(arm) for arm in arms):
            return Choice(str(gemm))
        for _ in range(ROUNDS):
            sampler.round(arms)
    samples = sampler.samples
    winner = min(finalists, key=samples.median)
    assert winner.candidate
    ratios = [theirs / own for theirs, own in zip(samples.of(VENDOR_ARM), samples.of(winner), strict=True)]
    captures = [statistics.median(ratios[start : start + ROUNDS]) for start in range(0, len(ratios), ROUNDS)]
    ours, vendors = round(samples.median(winner), 3), round(samples.median(VENDOR_ARM), 3)
    if samples.ratio(VENDOR_ARM, winner).low <= LEAST_GAIN or min(captures) <= 1:
        return Choice(str(gemm), us=ours, vendor_us=vendors)
    text = schedule_text(winner.candidate.schedule)
    return Choice(str(gemm), winner.kernel, winner.candidate.family, text, ours, vendors)


def candidates(
    gemm: Gemm, device: int, found: Pack, one_stream: bool = False, rule: int = TUNED
) -> Iterator[Iterator[Arm]]:
    """For each schedule of the pack that serves a shape under a rule, the ways to launch it."""
    for name, compiled in family_schedules(found, gemm):
        if family_of(name).reads_ahead and rule != AHEAD:
            continue
        yield _ways(name, compiled, gemm, device, found, one_stream)


def _ways(name: str, compiled: dict[str, int], gemm: Gemm, device: int, found: Pack, one_stream: bool) -> Iterator[Arm]:
    target = dispatch.target_of(device)
    for made in serving(family_of(name), compiled, gemm, target):
        terms = dispatch.terms(made.source)
        kernel = contract.kernel_id(made.source, terms)
        if kernel not in found.kernels:
            continue
        try:
            plan = terms.plan(gemm, target.sms)
        except contract.ContractError:
            continue
        if any(launch.coresident for launch in plan.launches) and not one_stream:
            return
        yield Arm(kernel, made)


class Graphs:
    """Calls on operands of one shape, each captured in a CUDA graph of back-to-back launches, and timed by replays.

    cold: B is another tensor in each launch, so that it comes from memory.
    """

    def __init__(self, gemm: Gemm, device: int, *, cold: bool) -> None:
        torch.cuda.empty_cache()  # a capture cannot take memory that is cached for other calls
        dtype, place = getattr(torch, gemm.dtype), torch.device("cuda", device)
        generator = torch.Generator(place).manual_seed(gemm.m * gemm.n + gemm.k)

        def drawn(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, device=place, dtype=dtype)

        b_bytes, others = 2 * gemm.k * gemm.n, 2 * gemm.m * (gemm.k + gemm.n)
        cache = max(0, dispatch.target_of(device).l2_bytes * COLD_CACHES - others) if cold else 0
        copies = min(1 + cache // b_bytes, max(1, MAX_COPIES_BYTES // b_bytes), 64)
        tn = gemm.layout is Layout.TN
        self.a = drawn(gemm.m, gemm.k)
        self.b = [drawn(gemm.n, gemm.k).t() if tn else drawn(gemm.k, gemm.n) for _ in range(copies)]
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, int]] = {}
        self._memory = torch.cuda.graph_pool_handle()  # replays never overlap
        self._stream = _capture_stream(device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._launches = 4

    def capture(self, name: Hashable, call: Product) -> None:
        """Have a graph of calls under a name. The first call's time says how many a graph has."""
        first = not self._graphs
        self._graphs[name] = self._captured(call)
        if first:
            self._launches = max(1, min(64, math.ceil(REPLAY_US / self.sample(name))))
            self._graphs[name] = self._captured(call)

    def sample(self, name: Hashable) -> float:
        """Microseconds a launch of one replay."""
        graph, launches = self._graphs[name]
        start, end = self._events
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / launches

    def _captured(self, call: Product) -> tuple[torch.cuda.CUDAGraph, int]:
        graph, count = torch.cuda.CUDAGraph(), max(self._launches, len(self.b))
        call(self.a, self.b[0])
        with torch.cuda.stream(self._stream):  # torch.cuda.graph would give all cached memory back each time
            graph.capture_begin(self._memory)
            try:
                for number in range(count):
                    call(self.a, self.b[number % len(self.b)])
            finally:
                graph.capture_end()
        graph.replay()
        return graph, count


class GraphTimer(Graphs):
    """Times arms on a CUDA device: launches of the op, or of torch.mm.

    rule: TUNED, or AHEAD where B may be read ahead.
    """

    def __init__(self, gemm: Gemm, device: int, found: Pack, *, cold: bool, rule: int = TUNED) -> None:
        super().__init__(gemm, device, cold=cold)
        self._gemm, self._device, self._pack, self._rule = gemm, device, found, rule
        self._expected = torch.mm(self.a, self.b[0]).float()
        self._vendor_us = self._us(torch.mm)
        self._tried = set[Arm]()

    def prepare(self, arm: Arm) -> bool:
        call: Product = torch.mm
        if arm.candidate:
            if dispatch.launch(arm.candidate, self._gemm, self._device, arm.kernel, self._pack, self._rule):
                return False
            call = self._call
            for b in self.b if self._rule == AHEAD else ():  # a capture reads ahead what was met before it, unchanged
                call(self.a, b)
            error = call(self.a, self.b[0]).float() - self._expected
            limit = LIMIT[self._gemm.dtype] * self._expected.square().mean().sqrt().item()
            if not error.square().mean().sqrt().item() <= limit:  # also where it is no number
                return False
            if arm not in self._tried and self._us(call) > SLOW * self._vendor_us + LAUNCH_US:
                return False
            self._tried.add(arm)  # not again: a finalist would be lost to a pause of the host's
        self.capture(arm, call)
        return True

    def _us(self, call: Product) -> float:
        """Microseconds of one call, or of the host's part; the least of several, since the host may pause."""
        start, end = self._events
        least = math.inf
        for _ in range(CALLS):
            start.record()
            call(self.a, self.b[0])
            end.record()
            end.synchronize()
            least = min(least, float(start.elapsed_time(end)) * 1e3)
        return least

    def alone(self, name: str) -> bool:
        """Capture bare launches of what the op's table has for the shape; whether it can be launched so."""
        self._c, key = self.a.new_empty(self._gemm.m, self._gemm.n), key_of(self._gemm, self._device)

        def launch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            addresses = [tensor.data_ptr() for tensor in (a, b, self._c)]
            if not native().bare(key, addresses, torch.cuda.current_stream().cuda_stream, 1):
                raise LookupError
            return self._c

        try:
            self.capture(name, launch)
        except LookupError:
            return False
        return True

    def _call(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self._rule == AHEAD:
            return matmul(a, b, weights_ahead=True)
        product: torch.Tensor = torch.ops.cuda_l2.product.default(a, b)
        return product


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all captures on a device: cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _source(choice: Choice, gemm: Gemm, device: int, found: Pack) -> tuple[Candidate | None, Pack]:
    """A choice's kernel and the pack that holds its code."""
    if choice.family == imported.FAMILY:
        return imported.find(choice.kernel)
    if choice.family == vendor.FAMILY:
        return Candidate("", vendor.FAMILY, schedule_of(choice.schedule), vendor.FAMILY), found
    wanted = dict(schedule_of(choice.schedule))
    return named(family_of(choice.family), wanted, gemm, dispatch.target_of(device), choice.kernel), found


def device_for_timing() -> int:
    """The current CUDA device; UserError where there is none that runs the pack's kernels."""
    if not torch.cuda.is_available() or not READY:
        raise UserError("this needs an NVIDIA GPU, and torch built with CUDA; `cuda-l2 doctor` says what is missing")
    device = torch.cuda.current_device()
    matmul(*[torch.ones(8, 8, dtype=torch.float16, device="cuda")] * 2)  # starts the op
    if not dispatch.serves(device):
        raise UserError(
            f"{torch.cuda.get_device_name(device)} does not run the pack's kernels, which are for Hopper GPUs"
        )
    return device


def _read(shapes: Iterable[str | Gemm]) -> list[Gemm]:
    return list(dict.fromkeys(Gemm.parse(shape) if isinstance(shape, str) else shape for shape in shapes))


def _recorded(model: torch.nn.Module, inputs: Sequence[Any], named: dict[str, Any]) -> list[Gemm]:
    if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
        inputs = inputs[0]
    with torch.no_grad(), recorded() as seen:
        model(*inputs, **named)
    if not seen.shapes:
        raise UserError("no product of fp16 or bf16 matrices came up that a kernel could serve: is the model in bf16?")
    return list(seen.shapes)
