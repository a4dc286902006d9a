"""Times many kernels on one shape after another, quickly: to choose among our own, not to report.

One process keeps every kernel loaded and binds it to a shape's operands; each first output is compared with torch's,
loosely. Samples are replays of a graph of back-to-back launches, on a warm chip and in random order: what is timed
early on a cool chip looks up to 10 % faster. Or, where kernels for single launches are chosen, one launch with nothing
cached, by CUPTI. The process is thrown away after a hang or fault, which costs one kernel on one shape.
"""

import itertools
import math
import multiprocessing
import pickle
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from cuda_l2.contract.cuda import Plan
from cuda_l2.measure.sampler import Sampler, Samples
from cuda_l2.records import Accumulate, Gemm, Layout
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import MachineError

PLAIN, DEPENDENT = 0, 1
START_S = 120.0
PATIENCE_S = 20.0
"""Without a sign of life for so long, the kernel in turn hangs. A wait for other blocks' sums gives up after 3 s."""
GRAPH_US = 70.0
MAX_NODES = 32
ROUNDS = 2
FINAL_ROUNDS, LEAST_FINAL_ROUNDS, MEDIUM_US = 41, 7, 40.0
"""Rounds of the finalists: 41 for launches up to 40 us, fewer the longer they take, but 7 at least by default. With 7 a
difference of 1 % was chance, with 41 nearly all of it came out in the reports (docs/log.md)."""
COLD_FINAL_ROUNDS = 13
LONG_US = 300.0
"""From here on fewer finalists do, and only they are timed as dependents."""
EVICTED_CACHES = 2
"""Before a cold launch so many times the L2 cache is written."""
LIMITS = {Accumulate.FP32: 1e-3, Accumulate.FP16: 5e-2}
"""Relative RMS difference from torch's product; cuBLAS's own error is 2e-4 and 1e-2 at K = 16384. Of fp16 results: the
rounding of bf16 is eight times as coarse."""


@dataclass(frozen=True, slots=True)
class Item:
    """One kernel as one contract launches it plainly, on operands of one layout."""

    layout: Layout
    artifact: str  # path of the cubin
    plan: bytes  # pickled Plan
    dependent: bool  # it can also be launched as a programmatic dependent
    finalist: bool = False  # is timed in the second pass whatever the first one gave


@dataclass
class Sampled:
    """Microseconds of one item, plain and dependent, from the first and from the second pass; nan where not timed."""

    first: list[float] = field(default_factory=lambda: [float("nan"), float("nan")])
    final: list[float] = field(default_factory=lambda: [float("nan"), float("nan")])
    reason: str = ""  # why it was not


def as_dependent(plan: Plan) -> Plan:
    """The plan of the same schedule with EDGE = 1."""

    def launch(before: Any) -> Any:
        *rest, last = before.arguments  # the families' last argument tells the kernel, if it asks
        told = replace(last, name="1", data="01000000") if last.name == "0" else last
        return replace(before, programmatic=True, arguments=(*rest, told))

    return replace(plan, launches=tuple(map(launch, plan.launches)))


class QuickTimer(Closing):
    """The process that times, started again after a fault. A context manager."""

    def __init__(
        self, seed: int = 0, finalists: int = 4, *, cold: bool = False, least_rounds: int = LEAST_FINAL_ROUNDS
    ) -> None:
        """cold: single launches that find nothing of their operands cached, none of them as dependents.
        least_rounds: samples of a long launch in the second pass, at least; not used if cold.
        """
        self._settings, self._cold = (seed, finalists, least_rounds, cold), cold
        self._context = multiprocessing.get_context("spawn")
        self._turn = self._context.Value("i", -1, lock=False)
        self._start()

    def time(self, gemm: Gemm, items: Sequence[Item]) -> list[Sampled]:
        """Samples of every item, in order. A fault is the item's reason, and the others are timed again without it."""
        items = [replace(item, dependent=False) for item in items] if self._cold else items
        faults: dict[int, str] = {}
        while True:
            left = [i for i in range(len(items)) if i not in faults]
            reason = self._ask(gemm, [items[i] for i in left])
            if isinstance(reason, list):
                samples = dict(zip(left, reason, strict=True))
                return [samples.get(i) or Sampled(reason=faults[i]) for i in range(len(items))]
            turn = self._turn.value
            self.close()
            self._start()
            if turn < 0:
                raise MachineError(f"the process that times failed on {gemm}: {reason}")
            faults[left[turn]] = reason

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _start(self) -> None:
        self._pipe, other = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(other, self._turn, *self._settings), daemon=True)
        self._process.start()
        other.close()
        if not self._pipe.poll(START_S) or self._pipe.recv() != "ready":
            raise MachineError("the process that times did not start")

    def _ask(self, gemm: Gemm, items: Sequence[Item]) -> list[Sampled] | str:
        """The samples, or what went wrong while the item in turn was looked at."""
        self._turn.value = -1
        try:
            self._pipe.send((gemm, items))
            while self._pipe.poll(PATIENCE_S):
                answer: list[Sampled] | str = self._pipe.recv()
                if answer != "alive":
                    return answer
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return "the process ended"
        return f"no end within {PATIENCE_S:.0f} s"


def _serve(pipe: Connection, turn: Any, seed: int, finalists: int, least_rounds: int, cold: bool) -> None:
    """The process: shapes with items in, samples out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    bench = (_ColdBench if cold else _Bench)(turn, seed, finalists, least_rounds, lambda: pipe.send("alive"))
    pipe.send("ready")
    while True:
        try:
            gemm, items = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(bench.time(gemm, items))
        except Exception as error:  # noqa: BLE001 - of whatever kind: the context may be unusable, the parent restarts
            pipe.send(f"{type(error).__name__}: {error}"[:300])


@dataclass(eq=False)
class _Arm:
    """One item, plain or as a dependent, and the graph that launches it `nodes` times."""

    index: int
    edge: int
    graph: Any
    nodes: int
    first: float = float("nan")


class _Bench:
    def __init__(self, turn: Any, seed: int, finalists: int, least_rounds: int, alive: Any) -> None:
        import torch  # noqa: PLC0415 - in this process alone

        from cuda_l2.machine.cuda.helpers import Helpers, compiled_helpers  # noqa: PLC0415
        from cuda_l2.machine.cuda.target import detect  # noqa: PLC0415

        self.torch, self.turn, self.alive = torch, turn, alive
        self.finalists, self.least_rounds = finalists, least_rounds
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self.stream)
        self.helpers = Helpers(compiled_helpers(detect().arch))
        self.modules: dict[str, Any] = {}
        self.tensors: dict[tuple[str, Any], Any] = {}  # by name and type
        self.workspaces: dict[tuple[int, int], Any] = {}  # by what fills them and place in a plan
        self.outgrown: list[Any] = []  # kernels of this shape are still bound to them
        self._warm_up()

    def time(self, gemm: Gemm, items: Sequence[Item]) -> list[Sampled]:
        self.outgrown.clear()
        self._operands(gemm)
        samples = [Sampled() for _ in items]
        guess_us = max(1.5, gemm.flops / 650e6, gemm.bytes / 4e6)
        arms: list[_Arm] = []
        order = list(range(len(items)))
        self.rng.shuffle(order)
        began = time.monotonic()
        for index in order:
            item = items[index]
            try:
                both = item.dependent and guess_us < LONG_US
                arms += self._arms(gemm, item, index, (PLAIN, DEPENDENT) if both else (PLAIN,), guess_us)
            except _Wrong as wrong:
                samples[index].reason = str(wrong)
            if time.monotonic() - began > PATIENCE_S / 4:
                self.alive()
                began = time.monotonic()
        taken = self._rounds(arms, ROUNDS)
        for arm in arms:
            samples[arm.index].first[arm.edge] = arm.first = min(taken.of(arm))
        final, more = self._final(gemm, items, arms, guess_us)
        taken = self._rounds(final, self._final_rounds(guess_us))
        for arm in final:
            samples[arm.index].final[arm.edge] = taken.median(arm)
        self.turn.value = -1
        for arm in [*arms, *more]:
            arm.graph.destroy()
        return samples

    def _rounds(self, arms: Sequence[_Arm], count: int) -> Samples[_Arm]:
        """So many rounds of interleaved samples."""

        def take(arm: _Arm) -> float:
            self.turn.value = arm.index
            return self._sample_us(arm)

        sampler = Sampler(take, self.rng)
        for _ in range(count):
            sampler.round(arms)
            self.alive()
        return sampler.samples

    def _final_rounds(self, guess_us: float) -> int:
        return max(self.least_rounds, round(FINAL_ROUNDS * min(1.0, MEDIUM_US / guess_us)))

    def _nodes(self, guess_us: float) -> int:
        """Launches that a graph holds."""
        return max(1 if guess_us > LONG_US else 2, min(MAX_NODES, round(GRAPH_US / guess_us)))

    def _sample_us(self, arm: _Arm) -> float:
        """Microseconds of a launch, once."""
        self.helpers.settle(self.stream.cuda_stream)
        return float(arm.graph.time()) * 1e6 / arm.nodes

    def _final(
        self, gemm: Gemm, items: Sequence[Item], arms: Sequence[_Arm], guess_us: float
    ) -> tuple[list[_Arm], list[_Arm]]:
        """The fastest of each layout and edge, and long ones as dependents too; then the latter alone."""
        count = self.finalists if guess_us < LONG_US else max(2, self.finalists - 1)
        found: list[_Arm] = []
        more: list[_Arm] = []
        for layout, edge in itertools.product(Layout, (PLAIN, DEPENDENT)):
            own = [arm for arm in arms if items[arm.index].layout is layout and arm.edge == edge]
            own.sort(key=lambda arm: arm.first)
            found += own[:count] + [arm for arm in own[count:] if items[arm.index].finalist]
        for arm in found:
            if items[arm.index].dependent and guess_us >= LONG_US:
                more += self._arms(gemm, items[arm.index], arm.index, (DEPENDENT,), guess_us)
        return found + more, more

    def _arms(self, gemm: Gemm, item: Item, index: int, edges: Sequence[int], guess_us: float) -> list[_Arm]:
        from cuda_l2.machine.cuda.driver import Graph, LaunchError, Loaded, Module  # noqa: PLC0415
        from cuda_l2.measure.launches import repeated  # noqa: PLC0415

        self.turn.value = index
        if item.artifact not in self.modules:
            self.modules[item.artifact] = Module(Path(item.artifact).read_bytes())
        stream, made = self.stream.cuda_stream, []
        nodes = self._nodes(guess_us)
        plain: Plan = pickle.loads(item.plan)  # our own parent's
        pointers = {"a": self.a, "b": self.b[item.layout], "c": self.c.data_ptr()}
        pointers |= {space.name: self._workspace(space, place) for place, space in enumerate(plain.workspaces)}
        for edge in edges:
            plan = as_dependent(plain) if edge == DEPENDENT else plain
            try:
                bound = Loaded(self.modules[item.artifact], plan).bind(pointers)
            except LaunchError as error:
                raise _Wrong(str(error)) from None
            self._check(gemm, bound)
            made.append(_Arm(index, edge, Graph(stream, repeated(bound.launch, nodes)), nodes))
        return made

    def _check(self, gemm: Gemm, bound: Any) -> None:
        self.c.fill_(float("nan"))
        bound.launch(self.stream.cuda_stream)
        torch = self.torch
        difference = float(torch.linalg.vector_norm(self.c - self.reference, dtype=torch.float32) / self.norm)
        coarser = torch.finfo(self.c.dtype).eps / torch.finfo(torch.half).eps
        if not difference < LIMITS[gemm.accumulate] * coarser:
            for (fill, _), tensor in self.workspaces.items():
                tensor.fill_(fill)  # it may not be as it was found
            raise _Wrong(f"wrong result: relative difference {difference:.2g}")

    def _operands(self, gemm: Gemm) -> None:
        torch = self.torch
        m, n, k, dtype = gemm.m, gemm.n, gemm.k, getattr(torch, gemm.dtype)
        shapes = {"a": (m, k), "b": (k, n), "b of tn": (n, k), "c": (m, n), "reference": (m, n)}
        a, b, other, self.c, self.reference = (
            self._tensor(name, math.prod(shape), dtype).view(shape) for name, shape in shapes.items()
        )
        other.copy_(b.t())
        torch.mm(a, b, out=self.reference)
        self.norm = torch.linalg.vector_norm(self.reference, dtype=torch.float32)
        self.a, self.b = a.data_ptr(), {Layout.NN: b.data_ptr(), Layout.TN: other.data_ptr()}

    def _tensor(self, name: str, size: int, dtype: Any = None) -> Any:
        """The beginning of a buffer of normal numbers, of fp16 if not said, that serves every shape."""
        torch, dtype = self.torch, dtype or self.torch.half
        if (name, dtype) not in self.tensors or self.tensors[name, dtype].numel() < size:
            self.outgrown.append(self.tensors.get((name, dtype)))
            self.tensors[name, dtype] = torch.randn(max(size, 1 << 24), dtype=dtype, device="cuda")
        return self.tensors[name, dtype][:size]

    def _workspace(self, space: Any, place: int) -> int:
        """A buffer for the workspace at this place of a plan. Plans share buffers, also persistent ones that are filled
        alike, since kernels leave those as they found them.
        """
        if not space.persistent:
            return int(self._tensor(f"scratch {place}", -(-space.bytes // 2)).data_ptr())
        fill = space.fill - (1 << 32) if space.fill >= 1 << 31 else space.fill
        words = -(-space.bytes // 4)
        if (fill, place) not in self.workspaces or self.workspaces[fill, place].numel() < words:
            shape = (max(2 * words, 1 << 23),)
            self.outgrown.append(self.workspaces.get((fill, place)))
            self.workspaces[fill, place] = self.torch.full(shape, fill, dtype=self.torch.int32, device="cuda")
        return int(self.workspaces[fill, place].data_ptr())

    def _warm_up(self) -> None:
        x = self._tensor("a", 8192 * 8192).view(8192, 8192)
        for _ in range(400):
            self.torch.mm(x, x)
        self.torch.cuda.synchronize()


class _ColdBench(_Bench):
    """Samples as the server protocol takes them, but for its gaps."""

    def __init__(self, turn: Any, seed: int, finalists: int, least_rounds: int, alive: Any) -> None:
        from cuda_l2.machine.cuda.cupti import KernelTrace  # noqa: PLC0415

        super().__init__(turn, seed, finalists, least_rounds, alive)
        size = EVICTED_CACHES * self.torch.cuda.get_device_properties(0).L2_cache_size
        self.evicted = self.torch.empty(size, dtype=self.torch.uint8, device="cuda")
        self.evictions = 0
        self.trace = KernelTrace()

    def _final_rounds(self, guess_us: float) -> int:
        del guess_us  # clearing the caches takes longer than any launch that gains by many rounds
        return COLD_FINAL_ROUNDS

    def _nodes(self, guess_us: float) -> int:
        del guess_us
        return 1

    def _sample_us(self, arm: _Arm) -> float:
        self.evictions = (self.evictions + 1) % 256
        self.evicted.fill_(self.evictions)
        self.helpers.settle(self.stream.cuda_stream)
        self.stream.synchronize()
        self.trace.clear()
        arm.graph.once()
        return self.trace.span_s() * 1e6


class _Wrong(Exception):
    """Why an item is not timed."""
