"""An NVIDIA GPU: candidates in a worker process, NVIDIA's libraries and all references in this one."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from cuda_l2 import contract
from cuda_l2.build.build_server import BuildServers
from cuda_l2.build.stress import stressed
from cuda_l2.machine.cuda import sanitizer
from cuda_l2.machine.cuda import target as cuda
from cuda_l2.machine.cuda.alone import given_file
from cuda_l2.machine.cuda.arena import CudaArena
from cuda_l2.machine.cuda.driver import bus_id
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.machine.cuda.windows import PRODUCT_WINDOWS, Sharing, arena_bytes
from cuda_l2.machine.cuda.worker import CudaWorkers
from cuda_l2.machine.gpus import visible
from cuda_l2.measure.baselines._base import Baseline, LibraryProduct, strongest_first
from cuda_l2.measure.graph_rounds import Gpu, measure_cuda
from cuda_l2.measure.libraries import Libraries
from cuda_l2.measure.product_memory import ProductMemory, library_outputs, other_layout
from cuda_l2.measure.profile import collect
from cuda_l2.measure.protocols import CUDA_PROTOCOLS, FINALS, Protocol
from cuda_l2.measure.rounds import Kernel, Limits, Terms
from cuda_l2.measure.task_memory import CudaTaskBaselines, TaskMemory
from cuda_l2.measure.timed_memory import TimedMemory
from cuda_l2.records import Build, Candidate, Gemm, Task, Timing, Verdict
from cuda_l2.rigs._base import Bench, Elsewhere, Request, Rig
from cuda_l2.rigs.elsewhere import judge_on
from cuda_l2.rigs.kept import KeptBaselines
from cuda_l2.system import variables
from cuda_l2.system.errors import MachineError, UserError
from cuda_l2.system.steps import step
from cuda_l2.system.turns import ALONE, Turns
from cuda_l2.tasks.kinds import Home, kind_of
from cuda_l2.tasks.other_sizes import FAR_BYTES
from cuda_l2.tasks.products import CACHE_BYTES
from cuda_l2.tasks.warm import in_full_precision
from cuda_l2.verify import all_checks, deviation, verify
from cuda_l2.verify._cuda import CudaSession, Facilities, Sanitize

DEVICE = "cuda"
WORKSPACE_BYTES, WORKSPACES, PRODUCT_WORKSPACES = 256 << 20, 2, 8
"""Bytes that a candidate's workspaces may take, and what they may take beyond: the bytes of the task's tensors times
WORKSPACES, or those of a matrix product's C times PRODUCT_WORKSPACES."""
RUNS = 3
LONG_RUN_S = 2.0
"""A run whose clocks drifted between arms is repeated, at most so often, and no more once it took so long: kernels that
differ in power differ in clock. The last one says that it drifted."""
CACHED_BYTES = 8 << 30
"""Memory that torch may hold unused when the next shape comes."""
CACHES_ROTATED = 2.2
"""Rotating operands take this many times the L2 cache together."""
MAX_ROTATED, MAX_ROTATED_PRODUCTS = 128, 512
"""Each window of a task that is no matrix product has a case of its own, with its reference."""
SHARING = {False: Sharing.SEPARATE, True: Sharing.ROTATING}
PRODUCT_SHARING = {False: Sharing.OVERLAPPING, True: Sharing.PACKED}
"""By whether windows rotate."""
LEAST_WINDOWS, MOST_WINDOWS = 2, 4
CACHE_SHARE = 0.5
"""Share of the L2 cache that a timed round's windows may take together where they are more than the least."""
REFERENCE_COPIES = 12
"""Copies of a task's tensors in fp64 that a reference and its tolerance take at once, about."""
FAR_ARENAS = 4
"""How often tensors at the largest `far` sizes lie in an arena: as they are, staged, and outputs as two records."""
OTHERS_BYTES = 4 << 30
"""Memory of CUDA contexts and the like in processes that hold a file's Model and tensors."""
PROCESS_BYTES = 4 << 30
"""What a judging process has on the GPU beside a task's: three contexts, and what torch keeps unused."""
LEAST_CACHED, MOST_CACHED = 1 << 30, 48 << 30
"""Bytes of cases that are kept, with their references."""
MOST_MODELS = 2
"""KernelBench files whose processes are kept for the next kernel; each has two Pythons with a CUDA context."""
CASES = 37
"""Cases of a matrix product that one verification draws."""
T = TypeVar("T")


class CudaRig(Rig):
    """One GPU, its workers, its baselines."""

    target: CudaTarget
    suffix = ".cu"
    group = 32

    def __init__(
        self,
        request: Request = Request(),
        builders: BuildServers | None = None,
        *,
        patience: float = 1.0,
        tunes: bool = True,
        sanitize: Sanitize = sanitizer.findings,
    ) -> None:
        """What follows the request is for verifying beside others, where nothing is timed.

        patience: time limits are so many times the usual ones. tunes: whether cuBLASLt's algorithms are always timed
        before a candidate is compared with them; where not, only if it fails without them. sanitize: who runs the
        sanitizer.
        """
        self.request, self.tunes = request, tunes
        self.target = cuda.detect()
        torch.zeros(1, device="cuda")  # the driver's calls below need torch's context
        self.gpu = bus_id()
        self.turns = Turns(request.turns / self.gpu.replace(":", "-")) if request.turns else ALONE
        with self.turns.taken(alone=True):
            self.target.ceilings()
        self.protocols = CUDA_PROTOCOLS
        with contextlib.ExitStack() as stack:  # what was started ends where something after it does not start
            self.libraries = stack.enter_context(
                Libraries(
                    request.tuning,
                    retunes=request.retune,
                    choices=request.choices,
                    keeps=tunes,
                    searches=request.searches,
                )
            )
            self.workers = stack.enter_context(CudaWorkers(self.target.arch))
            self.builders = builders or BuildServers(self.target)
            kept: KeptBaselines[CudaTaskBaselines] = KeptBaselines(
                CudaTaskBaselines(), lambda kind, task: kind.device_baselines(task), MOST_MODELS
            )
            stack.callback(kept.close)
            self.torch_of = kept.of
            """PyTorch on a task other than a matrix product: of a file its own Model."""
            stack.callback(self.builders.close)
            self._opened = stack.pop_all()
        self.shared = Gpu(self.workers, self.target.sms, self.target.l2_bytes, self.turns)
        self.facilities = Facilities(self.workers, self.target.sms, self._stress_builds, patience, sanitize, self.turns)

    def open(self, task: Task, seed: int, *, both_layouts: bool = False) -> Bench:
        self.require_feasible(task)
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > CACHED_BYTES:
            torch.cuda.empty_cache()  # the driver, which gives the arena its memory, does not see it as free
        return CudaBench(self, task, seed, both_layouts)

    def reports(self, task: Task, protocols: Sequence[str]) -> list[str]:
        single = kind_of(task).single_launches
        found = [name for name in protocols if single or self.protocols[name].round_s]
        if not found:
            require_timed(task, self.protocols[protocols[0]])
        return found

    def free_bytes(self) -> int:
        """Bytes of the GPU's memory that are free; what torch keeps unused counts as free."""
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def require_feasible(self, task: Task) -> None:
        require_feasible(task, self.target.l2_bytes, self.rotated(task), self.free_bytes())

    def together(self, task: Task, asked: int) -> int:
        return min(asked, together(task, self.target.l2_bytes, self.rotated(task), self.free_bytes()))

    def rotated(self, task: Task) -> int:
        """Number of windows met in turn where none is to be in the cache when it comes again."""
        most = MAX_ROTATED_PRODUCTS if task.product else MAX_ROTATED
        return min(most, max(2, int(CACHES_ROTATED * self.target.l2_bytes / max(1, task.bytes)) + 1))

    def retried(self, work: Callable[[], T]) -> T:
        """A fault of the machine is no verdict on what ran: once more in a fresh process, then it ends the run."""
        try:
            return work()
        except (MachineError, torch.cuda.OutOfMemoryError):
            self.workers.renew()
            torch.cuda.empty_cache()
            return work()

    def steadily(self, measure: Callable[[], dict[str, Timing]]) -> dict[str, Timing]:
        """Timings of a run in which clocks did not drift between arms, or of the last of a few."""
        for _ in range(RUNS):
            timings = measure()
            drifted = any(timing.conditions.drifted for timing in timings.values())
            if not drifted or max(timing.seconds for timing in timings.values()) > LONG_RUN_S:
                break
        return timings

    def _stress_builds(self, candidate: Candidate, seeds: Sequence[int], counts: bool) -> Sequence[Build]:
        """Builds of a candidate with delays, one a seed."""
        sources = [stressed(candidate.source, seed, counts=counts) for seed in seeds]
        return list(self.builders.build([Candidate(source) for source in sources]))

    def require_tools(self) -> None:
        sanitizer.find()

    def environment(self) -> dict[str, Any]:
        versions = {"torch": importlib.metadata.version("torch")}
        return self.target.environment() | versions | variables.recorded(own_process=True)

    def describe(self, gemm: Gemm, baseline: Baseline) -> dict[str, Any]:
        return baseline.describe(self.libraries, gemm) if isinstance(baseline, LibraryProduct) else {}

    def keep_choices(self, gemms: Iterable[Gemm]) -> int:
        return self.libraries.keep_choices(gemms)

    def elsewhere(self, task: Task, candidate: Candidate) -> Elsewhere | None:
        other = next(iter(visible()[1:]), "")
        known = kind_of(task).known_by_text
        return judge_on(other, task, candidate, FINALS.name) if other and known else None

    def prefetch(self, candidates: Sequence[Candidate]) -> list[Callable[[], Build]]:
        return self.builders.begin(candidates)

    def close(self) -> None:
        self._opened.close()


class CudaBench(Bench):
    """The stages for one task on a GPU. both_layouts: kernels may read B in either layout."""

    def __init__(self, rig: CudaRig, task: Task, seed: int, both_layouts: bool = False) -> None:
        self._rig, self._task = rig, task
        self._beside = [other_layout(task)] if task.product and both_layouts else []
        if task.product:
            rig.libraries.hold(task)
        try:
            self._draw(seed)
        except BaseException:
            self.close()
            raise

    def _draw(self, seed: int) -> None:
        """Cases, and memory for their shapes."""
        rig, task = self._rig, self._task
        self._arenas: dict[bool, CudaArena] = {}
        self._memories: dict[bool, TimedMemory] = {}
        """By whether they rotate."""
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator(DEVICE).manual_seed(seed)
        need = needed_bytes(task, rig.target.l2_bytes, rig.rotated(task))
        cached = int(min(MOST_CACHED, max(LEAST_CACHED, (rig.free_bytes() - need) / 2)))
        home = Home(DEVICE, cached, partial(library_outputs, rig.libraries))
        self._cases = kind_of(task).cases(task, seed, home)
        self._arena(rotates=False)

    def build(self, candidates: Sequence[Candidate]) -> Iterator[Build]:
        return self._rig.builders.build(candidates)

    def verify(self, candidate: Candidate, build: Build, *, full: bool = False) -> Verdict:
        rig, arena = self._rig, self._arena(rotates=False)
        open_session = partial(CudaSession, candidate, build, arena, self._cases, rig.facilities)

        def judged() -> Verdict:
            return self._on_the_gpu(lambda: verify(open_session, all_checks(), full=full))

        if rig.tunes:
            self._on_the_gpu(lambda: self._tune(rotates=False))
        verdict = judged()
        if verdict.check == deviation.CHECK.name and not self._on_the_gpu(lambda: self._memory(rotates=False).tuned):
            self._on_the_gpu(lambda: self._tune(rotates=False))
            self._cases.close()  # the baselines are more, and what they allow may be
            verdict = judged()
        return verdict

    def profile(self, candidate: Candidate, build: Build) -> dict[str, float]:
        plan = contract.plan_cuda(candidate.source, self._task, self._rig.target.sms)
        case = self._cases.alone(self._task)
        with given_file(self._task, case.tensors if case else None) as given:
            return collect(Path(build.artifact), plan, self._task, given)

    def time_kernels(
        self, kernels: Mapping[str, Kernel], protocol: Protocol, limits: Limits = Limits()
    ) -> dict[str, Timing]:
        terms = Terms(protocol, self._rng, limits)
        measure = self._on_the_gpu(lambda: self._prepared(kernels, terms))
        return self._rig.steadily(lambda: self._on_the_gpu(measure))

    def renew(self) -> None:
        self._rig.workers.renew()

    def redraw(self, seed: int) -> None:
        self._free()
        self._draw(seed)

    def close(self) -> None:
        self._free()
        if self._task.product:
            self._rig.libraries.release(self._task)
        else:
            torch.cuda.empty_cache()  # the driver, which gives the next arena its memory, does not see it as free

    def _free(self) -> None:
        """Give cases, arenas and what is timed back."""
        torch.cuda.synchronize()  # nothing may be at work in memory that goes
        self._rig.workers.detach()
        for memory in self._memories.values():
            memory.close()
        for arena in self._arenas.values():
            arena.close()
        self._memories, self._arenas = {}, {}
        self._cases.close()

    def _tune(self, *, rotates: bool) -> None:
        """Time the libraries' algorithms, alone on the GPU, unless that was done before."""
        memory = self._memory(rotates)
        with step("timing the libraries' algorithms"):
            if not memory.tuned:
                with self._rig.turns.taken(alone=True):
                    memory.tune()

    def _prepared(self, kernels: Mapping[str, Kernel], terms: Terms) -> Callable[[], dict[str, Timing]]:
        """What times kernels beside the task's baselines, the usual strongest first.

        In a search the first that works without a compiler stands for all.
        """
        rig, task, protocol = self._rig, self._task, terms.protocol
        require_timed(task, protocol)
        self._arena(protocol.rotates).select(task)
        memory = self._memory(protocol.rotates)
        self._tune(rotates=protocol.rotates)
        wanted = strongest_first(memory.available(), task)
        if protocol.selects:
            wanted = [baseline for baseline in wanted if not baseline.compiled]
        elif task.product:
            wanted = rig.request.reported(wanted, protocol.name)
        chosen = memory.arms(wanted)
        chosen = chosen[:1] if protocol.selects else chosen

        def measure() -> dict[str, Timing]:
            timings = measure_cuda(rig.shared, chosen, kernels, memory, terms)
            said = {} if protocol.selects else memory.conditions
            return {
                name: replace(timing, conditions=replace(timing.conditions, **said)) for name, timing in timings.items()
            }

        return measure

    def _on_the_gpu(self, work: Callable[[], T]) -> T:
        """Without gradients and in the task's precision; UserError where the GPU's memory does not suffice."""

        def run() -> T:
            with torch.inference_mode() if self._task.product else torch.no_grad(), in_full_precision():
                return work()

        try:
            return self._rig.retried(run)
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                f"{self._task}: its reference in fp64, or PyTorch's own way, takes more memory than this GPU has left;"
                " choose smaller sizes, or end what else runs on the GPU"
            ) from None

    def _arena(self, rotates: bool) -> CudaArena:
        if rotates not in self._arenas:
            task = self._task
            sharing = (PRODUCT_SHARING if task.product else SHARING)[rotates]
            count = self._rig.rotated(task) if rotates else windows(task, self._rig.target.l2_bytes)
            each = [task, *self._cases.others, *self._cases.far]
            self._arenas[rotates] = CudaArena(
                each, workspace_bytes(task), windows=count, sharing=sharing, beside=self._beside
            )
        return self._arenas[rotates]

    def _memory(self, rotates: bool) -> TimedMemory:
        if rotates not in self._memories:
            rig, task, arena = self._rig, self._task, self._arena(rotates)
            self._memories[rotates] = (
                ProductMemory(arena, task, self._generator, rig.workers.helpers, rig.libraries)
                if task.product
                else TaskMemory(arena, self._cases, self._rng, rig.workers.helpers, rig.torch_of)
            )
        return self._memories[rotates]


def windows(task: Task, l2_bytes: int) -> int:
    """How many sets of tensors timed launches alternate between.

    Of a matrix product a fixed number; of another task as many as the cache keeps where it would keep one.
    """
    if task.product:
        return PRODUCT_WINDOWS
    return max(LEAST_WINDOWS, min(MOST_WINDOWS, int(CACHE_SHARE * l2_bytes / max(1, task.bytes))))


def workspace_bytes(task: Task) -> int:
    """What a candidate's workspaces may take."""
    if task.product:
        return WORKSPACE_BYTES + PRODUCT_WORKSPACES * sum(tensor.bytes for tensor in task.outputs)
    return WORKSPACE_BYTES + WORKSPACES * task.bytes


def needed_bytes(task: Task, l2_bytes: int, rotated: int) -> int:
    """About what checking and timing take of the GPU's memory. rotated: windows of the rotating protocol."""
    inputs, outputs = (sum(tensor.elements for tensor in group) for group in (task.given, task.outputs))
    if task.product:
        # arena with staging, records and all outputs, private copies in the task's type and fp32, references in fp64
        plain = 26 * inputs + (42 + 4 * PRODUCT_WINDOWS) * outputs + 4 * WORKSPACE_BYTES
        # all cases of the checks, with what is expected of each
        cases = min(CACHE_BYTES[DEVICE], CASES * 2 * inputs + CASES * 4 * outputs)
        # shared and private operands of every window, B in both layouts, and what the arena has beside them
        return plain + cases + rotated * (6 * inputs + 4 * outputs) + 2 * inputs + 2 * WORKSPACE_BYTES
    arena = arena_bytes(task, workspace_bytes(task), windows(task, l2_bytes), Sharing.SEPARATE)
    processes = kind_of(task).reference_processes
    others = (OTHERS_BYTES + processes * MOST_WINDOWS * task.bytes) if processes else 0
    copied = max(inputs + outputs, FAR_BYTES // 2)  # of the type with the smallest elements
    return REFERENCE_COPIES * 8 * copied + arena + FAR_ARENAS * FAR_BYTES + LEAST_CACHED + others


def together(task: Task, l2_bytes: int, rotated: int, free_bytes: int) -> int:
    """How many processes can judge a task at once, at least 1, where one more is to report on it."""
    return max(1, free_bytes // (needed_bytes(task, l2_bytes, rotated) + PROCESS_BYTES) - 1)


def require_timed(task: Task, protocol: Protocol) -> None:
    """UserError where single launches of the task's baselines would be timed and cannot be traced."""
    if not protocol.round_s and not kind_of(task).single_launches:
        raise UserError(
            f"{task} is timed back to back alone, as in offline or rotating: its Model runs in a process of its own,"
            f" where single launches, as in {protocol.name}, cannot be traced"
        )


def require_feasible(task: Task, l2_bytes: int, rotated: int, free_bytes: int) -> None:
    """UserError where checking and timing the task does not fit into the GPU's memory."""
    need = needed_bytes(task, l2_bytes, rotated)
    if need > free_bytes:
        raise UserError(
            f"{task} needs about {need / 2**30:.1f} GiB of GPU memory to check and time,"
            f" {free_bytes / 2**30:.1f} GiB are free; choose smaller sizes, or end what else runs on the GPU"
        )
