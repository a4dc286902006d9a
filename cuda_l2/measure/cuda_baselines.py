"""NVIDIA's own products as baselines of the CUDA target (paper section 2.2), and what torch offers its users.

torch.matmul: the precision switches of the Gemm's class, B in the Gemm's layout; 'default switches' is torch as it
comes. cuBLAS, cuBLASLt-heuristic, cuBLASLt-AutoTuning: NN reads B row-major, TN column-major. Every arm writes C in
place from device addresses and may be captured into a CUDA graph once it has been launched on the stream. cuBLAS has
256 MiB of workspace.
"""

import contextlib
import datetime
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from cuda_l2.machine.cuda import target as cuda
from cuda_l2.machine.cuda.driver import check
from cuda_l2.machine.cuda.helpers import Helpers, compiled_helpers
from cuda_l2.measure import cublas, cuda_torch
from cuda_l2.measure.cublas import Algorithm, Cublas, CublasError, LtProduct
from cuda_l2.measure.cuda_arms import AUTOTUNED, AUTOTUNED_32F, BLAS, COMPILED, HEURISTIC, TORCH, TORCH_DEFAULT
from cuda_l2.measure.launches import Buffers, Enqueue, Launch, captured_kernels, graphs, on, repeated, wait
from cuda_l2.measure.selection import Selection, TimeRound, select
from cuda_l2.measure.tuned import Tuned, TunedLayout, TuneSettings, recall, store
from cuda_l2.records import Accumulate, Gemm, Layout
from cuda_l2.system import paths

__all__ = ["Baselines", "Buffers"]

WORKSPACE_BYTES = 256 << 20
CACHE_VERSION = 2
"""Of what is stored and of how it is measured; another one tunes anew."""
PAPER_WARMUP, PAPER_ROUNDS = 50, 100
PROBE_US = 500.0
LONG_US, HEAT_S, REHEAT_S = 40.0, 0.2, 0.05
"""Launches this long bring the chip to its power limit: tuning starts from there, not from idle. Power settles over
some 100 ms; a layout that is tuned right behind the other one needs less."""
IDLE_SIZES = 4
"""So many products that nobody times stay set up: a search's winner is reported after it."""
SHORT_US = 2000.0
"""A sample below this is timed behind another one, so that no host time is in it; in a longer one it is negligible."""


class Baselines:
    """All baselines on the current GPU. One a process; a context manager; for one stream at a time."""

    def __init__(self, *, keeps: bool = True) -> None:
        """keeps: whether choices of algorithms are stored; not where other work on the GPU disturbs them."""
        self._keeps = keeps
        self._target = cuda.detect()
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._blas = Cublas(self._workspace.data_ptr(), WORKSPACE_BYTES)
        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = int(check("cuStreamCreate", driver.cuStreamCreate(flag)))
        self._helpers = Helpers(compiled_helpers(self._target.arch))
        self._products: dict[tuple[Gemm, Layout], LtProduct] = {}
        self._tuned: dict[Gemm, Tuned] = {}
        self._compiled: dict[Gemm, cuda_torch.Compiled] = {}
        self._rng = random.Random(0)
        self.retunes = False
        """Whether choices that earlier processes stored are made anew."""
        self.chose = 0
        """Products whose algorithms this process timed."""
        self._holders: Counter[tuple[int, int, int]] = Counter()
        self._idle: dict[tuple[int, int, int], None] = {}
        """Sizes that nobody holds any more, the oldest first."""

    def hold(self, gemm: Gemm) -> None:
        """Keep what is made for this size until it is released as often as it was held."""
        size = (gemm.m, gemm.n, gemm.k)
        self._holders[size] += 1
        self._idle.pop(size, None)

    def release(self, gemm: Gemm) -> None:
        """The size's graphs are gone: it is forgotten once enough others came after it."""
        size = (gemm.m, gemm.n, gemm.k)
        self._holders[size] -= 1
        if self._holders[size] <= 0:
            del self._holders[size]
            self._idle[size] = None
        while len(self._idle) > IDLE_SIZES:
            self._forget(next(iter(self._idle)))

    def arms(self, gemm: Gemm) -> tuple[str, ...]:
        """The names that `launcher` takes for this product."""
        names = [TORCH] + [TORCH_DEFAULT] * (gemm.accumulate is Accumulate.FP32)
        names += [f"{BLAS} {layout.name}" for layout in Layout]
        served = [layout for layout in Layout if self._product(_plain(gemm), layout).algorithms]
        kinds = [HEURISTIC, AUTOTUNED] + [AUTOTUNED_32F] * (gemm.accumulate is Accumulate.FP16)
        names += [f"{kind} {layout.name}" for kind in kinds for layout in served]
        return (*names, COMPILED) if cuda_torch.can_compile() else tuple(names)

    def tune(self, gemm: Gemm, buffers: Buffers, *, settings: TuneSettings | None = None) -> Tuned:
        """Time cuBLASLt's algorithms in both layouts, or recall it from memory or disk. Overwrites C.

        Waits for the device first, so that operands may have been filled on any stream.
        """
        settings = settings or TuneSettings()
        if gemm.accumulate is Accumulate.FP16:
            self.tune(_fp32(gemm), buffers, settings=settings)
        plain = _plain(gemm)
        known = self._tuned.get(plain)
        if known is None or known.method != settings.method:
            path = self.choice_path(plain, settings.method)
            known = None if self.retunes else self._recall(path, plain, settings)
            if known is None:
                known = self._tune(plain, buffers, settings)
                self.chose += 1
                if self._keeps:
                    store(path, known)
            self._tuned[plain] = known
        return known

    def retime(self, gemm: Gemm, layout: Layout, buffers: Buffers, rounds: int) -> list[list[float]]:
        """Microseconds of every algorithm that `tune` found, in its order: one a round, all interleaved. Overwrites C.

        Empty where cuBLASLt does not serve the layout.
        """
        plain = _plain(gemm)
        tuned = self.tune(plain, buffers).of(layout)
        if tuned is None:
            return []
        product = self._product(plain, layout)
        enqueues = [on(_reading(layout, product.launcher(one)), buffers) for one in tuned.algorithms]
        for enqueue in enqueues:
            enqueue(self._stream)  # what a library sets up on first use is not captured
        wait(self._stream)
        everyone = range(len(enqueues))
        with self._replays(enqueues, TuneSettings(), HEAT_S) as (time_round, _):
            time_round(everyone)
            times = [time_round(everyone) for _ in range(rounds)]
        return [list(samples) for samples in zip(*times, strict=True)]

    @property
    def machine(self) -> str:
        """What choices of algorithms hold for."""
        return f"{self._target.model}-{self._target.driver}-{cublas.lt_version()}-v{CACHE_VERSION}"

    def choice_path(self, gemm: Gemm, method: str) -> Path:
        """Where a choice is kept."""
        folder = paths.cache_dir() / "cublaslt" / re.sub(r"[^\w.-]+", "-", self.machine)
        return folder / f"{gemm.m}x{gemm.n}x{gemm.k}-{gemm.accumulate}-{method}.json"

    def tuned(self, gemm: Gemm) -> bool:
        """Whether `tune` has been called for this product."""
        return _plain(gemm) in self._tuned

    def launcher(self, name: str, gemm: Gemm) -> Launch:
        """A function that enqueues one product.

        AutoTuning needs `tune` before. torch.compile is compiled here, which takes seconds. The first launch on a
        stream loads code and may allocate: launch once before capturing.
        """
        if name == TORCH:
            return cuda_torch.torch_matmul(gemm)
        if name == TORCH_DEFAULT:
            return cuda_torch.torch_matmul(gemm, default=True)
        if name == COMPILED:
            if gemm not in self._compiled:
                self._compiled[gemm] = cuda_torch.Compiled(gemm, self._stream)
            return self._compiled[gemm].launch
        kind, layout = _split(name)
        if kind == AUTOTUNED_32F:
            return self.launcher(f"{AUTOTUNED} {layout.name}", _fp32(gemm))
        if kind == BLAS:
            return _reading(layout, self._blas.gemm_ex(gemm, layout))
        algorithm = self._algorithm(kind, gemm, layout)
        return _reading(layout, self._product(_plain(gemm), layout).launcher(algorithm))

    def describe(self, name: str, gemm: Gemm) -> dict[str, Any]:
        """What an arm runs, for the record: library, types, algorithm, kernels with their grids."""
        torch_arm = name in (TORCH, TORCH_DEFAULT, COMPILED)
        described: dict[str, Any] = {
            "arm": name,
            "kernels": self._kernels(self.launcher(name, gemm)),
            "b_layout": str(gemm.layout if torch_arm else _split(name)[1]),
        }
        if torch_arm:
            settings = cuda_torch.switches(gemm, default=name == TORCH_DEFAULT)
            described |= {"library": f"torch {torch.__version__}", "switches": settings}
            if name == COMPILED:
                described["copies_result"] = self._compiled[gemm].copies
            return described
        kind, layout = _split(name)
        if kind == AUTOTUNED_32F:
            return self.describe(f"{AUTOTUNED} {layout.name}", _fp32(gemm)) | {"arm": name}
        described |= {
            "library": f"cuBLASLt {cublas.lt_version()}",
            "compute": cublas.compute_type(gemm.accumulate).name,
            "scale": cublas.scale_type(gemm.accumulate).name,
            "workspace_given": WORKSPACE_BYTES,
        }
        if kind != BLAS:
            described |= asdict(self._algorithm(kind, gemm, layout))
        if kind == AUTOTUNED:
            tuned = self._tuned[_plain(gemm)]
            found = tuned.of(layout)
            assert found is not None
            described |= {
                "method": tuned.method,
                "returned": len(found.algorithms),
                "returned_index": found.chosen,
                "regret": found.regret,
                "tuned": tuned.created,
            }
        return described

    def close(self) -> None:
        for product in self._products.values():
            product.close()
        self._products, self._compiled = {}, {}
        self._blas.close()
        if self._stream:
            check("cuStreamDestroy", driver.cuStreamDestroy(driver.CUstream(self._stream)))
            self._stream = 0

    def __enter__(self) -> "Baselines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self, size: tuple[int, int, int]) -> None:
        self._idle.pop(size, None)

        def of_size(gemm: Gemm) -> bool:
            return (gemm.m, gemm.n, gemm.k) == size

        for key in [key for key in self._products if of_size(key[0])]:
            self._products.pop(key).close()
        self._tuned = {gemm: tuned for gemm, tuned in self._tuned.items() if not of_size(gemm)}
        self._compiled = {gemm: compiled for gemm, compiled in self._compiled.items() if not of_size(gemm)}

    def _product(self, plain: Gemm, layout: Layout) -> LtProduct:
        if (plain, layout) not in self._products:
            self._products[plain, layout] = LtProduct(self._blas, plain, layout)
        return self._products[plain, layout]

    def _algorithm(self, kind: str, gemm: Gemm, layout: Layout) -> Algorithm:
        plain = _plain(gemm)
        if kind == HEURISTIC:
            algorithms = self._product(plain, layout).algorithms
            if algorithms:
                return algorithms[0]
        elif plain not in self._tuned:
            raise RuntimeError(f"tune {gemm} before launching {kind} {layout.name}")
        else:
            found = self._tuned[plain].of(layout)
            if found:
                return found.algorithms[found.chosen]
        raise RuntimeError(f"cuBLASLt does not compute {gemm} with B {layout}")

    def _recall(self, path: Path, plain: Gemm, settings: TuneSettings) -> Tuned | None:
        """What an earlier process stored; None where there is nothing, or nothing that still holds."""
        tuned = recall(path, plain, settings.method)
        if tuned is None:
            return None
        for layout in Layout:
            found = tuned.of(layout)
            if found and not self._product(plain, layout).supports(found.algorithms[found.chosen]):
                return None
        return tuned

    def _tune(self, plain: Gemm, buffers: Buffers, settings: TuneSettings) -> Tuned:
        started = time.perf_counter()
        check("cuCtxSynchronize", driver.cuCtxSynchronize())
        layouts = ((Layout.NN, HEAT_S), (Layout.TN, REHEAT_S))
        nn, tn = (self._tune_layout(plain, layout, buffers, settings, heat_s) for layout, heat_s in layouts)
        seconds = time.perf_counter() - started
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Tuned(plain.m, plain.n, plain.k, plain.accumulate, settings.method, nn, tn, seconds, now)

    def _tune_layout(
        self, plain: Gemm, layout: Layout, buffers: Buffers, settings: TuneSettings, heat_s: float
    ) -> TunedLayout | None:
        product = self._product(plain, layout)
        runs: list[tuple[Algorithm, Enqueue]] = []
        for algorithm in product.algorithms:
            run = on(_reading(layout, product.launcher(algorithm)), buffers)
            with contextlib.suppress(CublasError):  # the heuristic promises less than it checks
                run(self._stream)
                runs.append((algorithm, run))
        if not runs:
            return None
        wait(self._stream)
        enqueues = [run for _, run in runs]
        if settings.paper:
            selection = self._paper_rounds(plain, layout, product, [algorithm for algorithm, _ in runs])
        else:
            selection = self._replay_rounds(enqueues, settings, heat_s)
        return TunedLayout(
            tuple(algorithm for algorithm, _ in runs),
            tuple(" + ".join(captured_kernels(self._stream, enqueue)) for enqueue in enqueues),
            selection.times_us,
            selection.rounds,
            selection.chosen,
            selection.regret,
        )

    def _replay_rounds(self, enqueues: Sequence[Enqueue], settings: TuneSettings, heat_s: float) -> Selection:
        """Interleaved replays of back-to-back launches, of all and then of the best, on a warm chip."""
        with self._replays(enqueues, settings, heat_s) as (time_round, sample_us):
            finalists = min(settings.effort.finalists, len(enqueues))
            rounds = int(settings.max_s * 1e6 / (finalists * sample_us))
            effort = replace(settings.effort, max_rounds=max(8, min(settings.effort.max_rounds, rounds)))
            return select(time_round, len(enqueues), effort)

    @contextlib.contextmanager
    def _replays(
        self, enqueues: Sequence[Enqueue], settings: TuneSettings, heat_s: float
    ) -> Iterator[tuple[TimeRound, float]]:
        """What times a round of some of these by replays of back-to-back launches, and about the microseconds of each.

        The chip is warm where they are long enough to reach its power limit.
        """
        with graphs(self._stream, enqueues[:1]) as (probe,):
            once_us = probe.time()[0] * 1e6
        few = max(1, min(8, round(PROBE_US / once_us)))  # alone, a short kernel's time is mostly its launch
        with graphs(self._stream, [repeated(enqueues[0], few)]) as (probe,):
            one_us = probe.time()[0] / few * 1e6
        least, most = settings.replay_us
        launches = max(1, min(settings.max_launches, round(min(most, max(least, 8 * one_us)) / one_us)))
        sample_us = launches * one_us
        warm = 1 if sample_us < SHORT_US else 0
        with graphs(self._stream, [repeated(enqueue, launches) for enqueue in enqueues]) as timed:
            for number in range(int(heat_s * 1e6 / sample_us) if one_us > LONG_US else 0):
                timed[number % len(timed)].replay()

            def time_round(arms: Sequence[int]) -> list[float]:
                times = dict.fromkeys(arms, 0.0)
                for arm in self._rng.sample(list(arms), len(arms)):
                    self._helpers.settle(self._stream)
                    times[arm] = timed[arm].time(warm)[0] / launches * 1e6
                return list(times.values())

            yield time_round, sample_us * (1 + warm)

    def _paper_rounds(
        self, plain: Gemm, layout: Layout, product: LtProduct, algorithms: Sequence[Algorithm]
    ) -> Selection:
        """Single launches behind an untimed one, fresh random operands every round, all in shuffled order."""
        a, b, c = cuda_torch.random_operands(replace(plain, layout=layout))
        buffers = Buffers(a.data_ptr(), b.data_ptr(), b.data_ptr(), c.data_ptr())
        runs = [on(_reading(layout, product.launcher(algorithm)), buffers) for algorithm in algorithms]
        times: list[list[float]] = [[] for _ in runs]
        with graphs(self._stream, runs) as timed:
            for number in range(PAPER_WARMUP + PAPER_ROUNDS):
                a.normal_()
                b.normal_()
                torch.cuda.synchronize()
                for arm in self._rng.sample(range(len(timed)), len(timed)):
                    time_us = timed[arm].time()[0] * 1e6
                    if number >= PAPER_WARMUP:
                        times[arm].append(time_us)
        medians = [sorted(samples)[len(samples) // 2] for samples in times]
        return Selection(medians.index(min(medians)), tuple(medians), (PAPER_ROUNDS,) * len(runs), 0.0)

    def _kernels(self, launch: Launch) -> list[str]:
        """What one launch puts on a stream: captured and not run, so any mapped address serves as operands."""
        address = self._workspace.data_ptr()
        return captured_kernels(self._stream, on(launch, Buffers(address, address, address, address)))


def _reading(layout: Layout, launch: cublas.Launch) -> Launch:
    """A launch that takes B in both layouts from one that reads one of them."""
    if layout is Layout.NN:
        return lambda stream, a, b_nn, b_tn, c: launch(stream, a, b_nn, c)
    return lambda stream, a, b_nn, b_tn, c: launch(stream, a, b_tn, c)


def _plain(gemm: Gemm) -> Gemm:
    """The product without its layout: cuBLASLt is tuned in both."""
    return replace(gemm, layout=Layout.NN)


def _fp32(gemm: Gemm) -> Gemm:
    """The same product in the class of fp32 sums."""
    return replace(gemm, accumulate=Accumulate.FP32)


def _split(name: str) -> tuple[str, Layout]:
    kind, _, layout = name.rpartition(" ")
    if kind not in (BLAS, HEURISTIC, AUTOTUNED, AUTOTUNED_32F):
        raise KeyError(f"no baseline is called {name!r}")
    return kind, Layout[layout]
