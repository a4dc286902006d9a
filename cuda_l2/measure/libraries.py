"""NVIDIA's libraries on this GPU, set up once: handles, products, and cuBLASLt's choices of algorithms.

Both libraries have 256 MiB of workspace. The baselines in `baselines/` launch through this.
"""

import contextlib
import datetime
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from cuda_l2.machine.cuda import target as cuda
from cuda_l2.machine.cuda.driver import check
from cuda_l2.machine.cuda.helpers import Helpers, compiled_helpers
from cuda_l2.measure import brute, cublas, cuda_torch
from cuda_l2.measure.brute import Searched
from cuda_l2.measure.choices import Choices
from cuda_l2.measure.cublas import Algorithm, Cublas, CublasError, Launch, LtProduct
from cuda_l2.measure.launches import Buffers, Enqueue, captured_kernels, on, wait
from cuda_l2.measure.tuned import ADAPTIVE, PAPER_TUNING, Tuned, TunedLayout, recall, store
from cuda_l2.measure.tuning import HEAT_S, REHEAT_S, Tuner
from cuda_l2.records import Accumulate, Gemm, Layout, Task
from cuda_l2.system import paths
from cuda_l2.system.closing import Closing
from cuda_l2.system.steps import step

WORKSPACE_BYTES = 256 << 20
CACHE_VERSION = 2
"""Changes with the format of stored choices and with how they are measured; choices of another version are not read."""
IDLE_SIZES = 4
"""Number of products that stay set up after nobody times them: a search's winner is reported after it."""


Sizes = tuple[tuple[str, int], ...]
"""M, N and K of a product, by name."""


class Libraries(Closing):
    """cuBLAS and cuBLASLt on the current GPU. One a process; a context manager; for one stream at a time."""

    def __init__(
        self,
        method: str = ADAPTIVE,
        *,
        retunes: bool = False,
        choices: Path | None = None,
        keeps: bool = True,
        searches: Mapping[Layout, float] = MappingProxyType({}),
    ) -> None:
        """method: how algorithms are timed, one of TUNINGS.

        retunes: whether choices that earlier processes stored are made anew. choices: file of choices for many
        products, used where the cache has none. keeps: whether choices are stored; not where other work on the GPU
        disturbs them. searches: seconds to search among all configurations, by the layout of B; else it is not done.
        """
        self._method, self._retunes, self._keeps, self._searches = method, retunes, keeps, searches
        self._target = cuda.detect()
        self._choices = Choices(choices, self.machine) if choices else None
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self.blas = Cublas(self._workspace.data_ptr(), WORKSPACE_BYTES)
        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.stream = int(check("cuStreamCreate", driver.cuStreamCreate(flag)))
        helpers = Helpers(compiled_helpers(self._target.arch))
        self._tuner = Tuner(self.stream, helpers, np.random.default_rng(0))
        self._products: dict[tuple[Gemm, Layout], LtProduct] = {}
        self._tuned: dict[Gemm, Tuned] = {}
        self._searched: dict[tuple[Gemm, Layout], Searched | None] = {}
        self._compiled: dict[Gemm, cuda_torch.Compiled] = {}
        self.chose = 0
        """Products whose algorithms this process timed."""
        self._holders: dict[Sizes, int] = {}
        """How often each size is held; what was held or released last comes last."""

    def hold(self, product: Task) -> None:
        """Keep what is made for this size until it is released as often as it was held."""
        self._holders[product.sizes] = self._holders.pop(product.sizes, 0) + 1

    def release(self, product: Task) -> None:
        """The size's graphs are gone: it is forgotten once enough others came after it."""
        self._holders[product.sizes] = max(0, self._holders.pop(product.sizes, 0) - 1)
        idle = [size for size, holders in self._holders.items() if not holders]
        for size in idle[:-IDLE_SIZES]:
            self._forget(size)

    def product(self, gemm: Gemm, layout: Layout) -> LtProduct:
        """cuBLASLt on a product with B in a layout, whatever the Gemm's own is."""
        key = gemm.any_layout, layout
        if key not in self._products:
            self._products[key] = LtProduct(self.blas, *key)
        return self._products[key]

    def compiled(self, gemm: Gemm) -> cuda_torch.Compiled:
        """torch.compile's max-autotune of a product, compiled on first use."""
        if gemm not in self._compiled:
            self._compiled[gemm] = cuda_torch.Compiled(gemm, self.stream)
        return self._compiled[gemm]

    def tune(self, gemm: Gemm, buffers: Buffers) -> Tuned:
        """Time cuBLASLt's algorithms in both layouts, or recall it from memory or disk. Overwrites C.

        Waits for the device first, so that operands may have been filled on any stream.
        """
        if gemm.accumulate is Accumulate.FP16:
            self.tune(replace(gemm, accumulate=Accumulate.FP32), buffers)
        gemm = gemm.any_layout
        known = self._tuned.get(gemm)
        if known is None:
            path = self.choice_path(gemm, self._method)
            known = None if self._retunes else self._recall(path, gemm)
            if known is None:
                known = self._tune(gemm, buffers)
                self.chose += 1
                if self._keeps:
                    store(path, known)
            self._tuned[gemm] = known
        return known

    @property
    def machine(self) -> str:
        """What choices of algorithms hold for."""
        return f"{self._target.model}-{self._target.driver}-{cublas.lt_version()}-v{CACHE_VERSION}"

    def choice_path(self, gemm: Gemm, method: str) -> Path:
        """Where a choice is kept."""
        folder = paths.cache_dir() / "cublaslt" / re.sub(r"[^\w.-]+", "-", self.machine)
        dtype = "" if gemm.dtype == "float16" else f"-{gemm.dtype}"
        return folder / f"{gemm.m}x{gemm.n}x{gemm.k}-{gemm.accumulate}{dtype}-{method}.json"

    def keep_choices(self, gemms: Iterable[Gemm]) -> int:
        """Add the choices for these products to the file that was given; how many it holds then, 0 without one."""
        if self._choices is None:
            return 0
        both = [gemm.any_layout for gemm in gemms]  # one choice serves both layouts
        products = dict.fromkeys([*both, *(replace(gemm, accumulate=Accumulate.FP32) for gemm in both)])
        return self._choices.pack(self.choice_path, products, self._method, renewed=self.chose > 0)

    def is_tuned(self, gemm: Gemm) -> bool:
        """Whether `tune` has been called for this product."""
        return gemm.any_layout in self._tuned

    def tuned(self, gemm: Gemm) -> Tuned:
        """What `tune` found; RuntimeError where it has not been called."""
        if not self.is_tuned(gemm):
            raise RuntimeError(f"tune {gemm} before launching cuBLASLt's choice")
        return self._tuned[gemm.any_layout]

    def search(self, gemm: Gemm, buffers: Buffers, right: Callable[[Layout, Launch, int], bool]) -> None:
        """Search among all configurations in the layouts that are searched, once a product. Overwrites C.

        Needs `tune` before. right: see `brute.search`. A search in which the library fails finds nothing;
        EndOfRunError where a configuration faults.
        """
        gemm, tuned = gemm.any_layout, self.tuned(gemm)
        for layout, within_s in self._searches.items():
            if (gemm, layout) in self._searched:
                continue
            found, chosen = tuned.of(layout), None
            if found:
                product, looks = self.product(gemm, layout), partial(right, layout)
                faults = self.choice_path(gemm, f"faults-{layout}").with_suffix(".txt")
                said = (
                    f"searching cuBLASLt's configurations for {within_s:g} s, then timing the best, B {layout.upper()}"
                )
                with step(said), contextlib.suppress(CublasError):
                    chosen = brute.search(product, gemm.k, found, self._tuner, buffers, looks, within_s, faults)
            self._searched[gemm, layout] = chosen

    def is_searched(self, gemm: Gemm) -> bool:
        """Whether nothing is left of the searches that were asked for."""
        return all((gemm.any_layout, layout) in self._searched for layout in self._searches)

    def searched(self, gemm: Gemm, layout: Layout) -> Searched | None:
        """What `search` found; None where it found nothing or was not called."""
        return self._searched.get((gemm.any_layout, layout))

    def facts(self, gemm: Gemm) -> dict[str, Any]:
        """The libraries' version, types and workspace, for the record of a baseline."""
        return {
            "library": f"cuBLASLt {cublas.lt_version()}",
            "compute": cublas.compute_type(gemm.accumulate).name,
            "scale": cublas.scale_type(gemm.accumulate).name,
            "workspace_given": WORKSPACE_BYTES,
        }

    def kernels(self, launch: Launch) -> list[str]:
        """What one launch puts on a stream: captured and not run, so any mapped address serves as operands."""
        address = self._workspace.data_ptr()
        return captured_kernels(self.stream, on(launch, Buffers(address, address, address, address)))

    def close(self) -> None:
        for product in self._products.values():
            product.close()
        self._products, self._compiled = {}, {}
        self.blas.close()
        if self.stream:
            check("cuStreamDestroy", driver.cuStreamDestroy(driver.CUstream(self.stream)))
            self.stream = 0

    def _forget(self, size: Sizes) -> None:
        del self._holders[size]
        for key in [key for key in self._products if key[0].sizes == size]:
            self._products.pop(key).close()
        self._tuned = {gemm: tuned for gemm, tuned in self._tuned.items() if gemm.sizes != size}
        self._searched = {key: found for key, found in self._searched.items() if key[0].sizes != size}
        self._compiled = {gemm: compiled for gemm, compiled in self._compiled.items() if gemm.sizes != size}

    def _recall(self, path: Path, gemm: Gemm) -> Tuned | None:
        """What an earlier process stored; None where there is nothing, or nothing that still holds."""
        if self._choices:
            self._choices.unpack(path, gemm, self._method)
        tuned = recall(path, gemm, self._method)
        if tuned is None:
            return None
        for layout in Layout:
            found = tuned.of(layout)
            if found and not self.product(gemm, layout).supports(found.algorithms[found.chosen]):
                return None
        return tuned

    def _tune(self, gemm: Gemm, buffers: Buffers) -> Tuned:
        started = time.perf_counter()
        check("cuCtxSynchronize", driver.cuCtxSynchronize())
        layouts = ((Layout.NN, HEAT_S), (Layout.TN, REHEAT_S))
        nn, tn = (self._tune_layout(gemm, layout, buffers, heat_s) for layout, heat_s in layouts)
        seconds = time.perf_counter() - started
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Tuned(gemm.m, gemm.n, gemm.k, gemm.accumulate, self._method, nn, tn, seconds, now, gemm.dtype)

    def _tune_layout(self, gemm: Gemm, layout: Layout, buffers: Buffers, heat_s: float) -> TunedLayout | None:
        product = self.product(gemm, layout)

        algorithms: list[Algorithm] = []
        enqueues: list[Enqueue] = []
        for algorithm in product.algorithms:
            run = on(product.launcher(algorithm), buffers)
            with contextlib.suppress(CublasError):  # the heuristic promises less than it checks
                run(self.stream)
                algorithms.append(algorithm)
                enqueues.append(run)
        if not algorithms:
            return None
        wait(self.stream)
        if self._method == PAPER_TUNING:
            found = self._tuner.as_the_paper(
                replace(gemm, layout=layout), lambda fresh: [on(product.launcher(one), fresh) for one in algorithms]
            )
        else:
            found = self._tuner.by_replays(enqueues, heat_s)
        kernels = tuple(" + ".join(captured_kernels(self.stream, enqueue)) for enqueue in enqueues)
        return TunedLayout(tuple(algorithms), kernels, found.times_us, found.rounds, found.chosen, found.regret)
