"""An NVIDIA GPU: candidates in a worker process, NVIDIA's libraries and all references in this one."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from cuda_l2 import contract
from cuda_l2.build.build_server import BuildServers
from cuda_l2.build.stress import stressed
from cuda_l2.kernelbench.arms import KeptBaselines
from cuda_l2.kernelbench.cuda_arms import CudaModelBaselines
from cuda_l2.machine.cuda import sanitizer
from cuda_l2.machine.cuda import target as cuda
from cuda_l2.machine.cuda.arena import CudaArena
from cuda_l2.machine.cuda.driver import bus_id
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.machine.cuda.worker import CudaWorkers
from cuda_l2.measure.baselines._base import Baseline, LibraryProduct, library_baselines, strongest_first
from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.measure.cuda_outputs import CudaOperands
from cuda_l2.measure.cuda_task_baselines import CudaTaskBaselines
from cuda_l2.measure.graph_rounds import Gpu, measure_cuda
from cuda_l2.measure.launches import Buffers
from cuda_l2.measure.libraries import Libraries
from cuda_l2.measure.profile import collect
from cuda_l2.measure.protocols import CUDA_PROTOCOLS, FINALS, Protocol
from cuda_l2.measure.rounds import CANDIDATE, Kernel, Terms
from cuda_l2.measure.timed_memory import ProductMemory
from cuda_l2.measure.tuned import TuneSettings
from cuda_l2.records import Build, Candidate, Gemm, Layout, Operation, Task, Timing, Verdict
from cuda_l2.rigs import cuda_task
from cuda_l2.rigs._base import PAPER_TUNING, Bench, Elsewhere, Request, Rig
from cuda_l2.rigs.cuda_task import CudaTaskBench
from cuda_l2.rigs.elsewhere import judge_on, second_gpu
from cuda_l2.system import variables
from cuda_l2.system.errors import MachineError, UserError
from cuda_l2.tasks import is_foreign
from cuda_l2.verify import Cases, all_checks, deviation, verify
from cuda_l2.verify._base import CACHE_BYTES
from cuda_l2.verify._cuda import CudaReferences, CudaSession
from cuda_l2.verify._gpu import Facilities, Sanitize

WORKSPACE_BYTES = 256 << 20
RUNS = 3
LONG_RUN_S = 2.0
"""A run whose clocks drifted between arms is repeated, at most so often, and no more once it took so long: kernels that
differ in power differ in clock. The last one says that it drifted."""
CACHED_BYTES = 8 << 30
"""Memory that torch may hold unused when the next shape comes."""
CACHES_ROTATED = 2.2
"""Rotating operands take this many times the L2 cache together."""
MAX_ROTATED = 512
MOST_MODELS = 2
"""Of KernelBench files, whose processes are kept for the next kernel; each has two Pythons with a CUDA context."""
CASES = 18
"""Of inputs that one verification draws."""
T = TypeVar("T")


class CudaRig(Rig):
    """One GPU, its workers, its baselines."""

    target: CudaTarget
    suffix = ".cu"
    group = 32

    def __init__(
        self,
        request: Request = Request(),
        clock: Clock = CLOCK,
        *,
        patience: float = 1.0,
        tunes: bool = True,
        sanitize: Sanitize = sanitizer.findings,
    ) -> None:
        """What follows the clock is for verifying beside others, where nothing is timed.

        patience: time limits are so many times the usual ones. tunes: whether cuBLASLt's algorithms are always timed
        before a candidate is compared with them; where not, only if it fails without them. sanitize: who runs the
        sanitizer.
        """
        self.request, self.clock, self.tunes = request, clock, tunes
        self.target = cuda.detect()
        torch.zeros(1, device="cuda")  # the driver's calls below need torch's context
        self.target.ceilings()
        self.gpu = bus_id()
        self.protocols = CUDA_PROTOCOLS
        with contextlib.ExitStack() as stack:  # what was started ends where something after it does not start
            settings = TuneSettings(paper=request.tuning == PAPER_TUNING)
            libraries = Libraries(settings, retunes=request.retune, choices=request.choices, keeps=tunes, clock=clock)
            self.libraries = stack.enter_context(libraries)
            self.workers = stack.enter_context(CudaWorkers(self.target.arch))
            self.builders = BuildServers(self.target)
            self._task_baselines = CudaTaskBaselines()
            self._models = KeptBaselines(CudaModelBaselines, MOST_MODELS)
            stack.callback(self._models.close)
            stack.callback(self.builders.close)
            self._opened = stack.pop_all()
        self.shared = Gpu(self.workers, self.target.sms, self.target.l2_bytes)
        self.facilities = Facilities(self.workers, self.target.sms, self._stress_builds, patience, sanitize)

    def open(self, task: Task, seed: int, *, both_layouts: bool = False) -> Bench:
        self.require_feasible(task)
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > CACHED_BYTES:
            torch.cuda.empty_cache()  # the driver, which gives the arena its memory, does not see it as free
        if isinstance(task, Operation):
            return CudaTaskBench(self, task, seed)
        return CudaBench(self, task, seed, both_layouts)

    def baselines_of(self, task: Operation) -> CudaTaskBaselines:
        """PyTorch on a task: of a KernelBench file its own Model, kept as long as few others are asked for."""
        return self._models.get(task) if is_foreign(task.name) else self._task_baselines

    def reports(self, task: Task, protocols: Sequence[str]) -> list[str]:
        if not isinstance(task, Operation) or not is_foreign(task.name):
            return list(protocols)
        found = [name for name in protocols if self.protocols[name].round_s]
        if not found:
            cuda_task.require_back_to_back(task, self.protocols[protocols[0]])
        return found

    def free_bytes(self) -> int:
        """Of the GPU's memory; what torch keeps unused counts as free."""
        free, _ = torch.cuda.mem_get_info()
        return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def require_feasible(self, task: Task) -> None:
        if isinstance(task, Operation):
            cuda_task.require_feasible(task, self.target.l2_bytes, self.free_bytes())
            return
        gemm, need, free = task, self._needed_bytes(task), self.free_bytes()
        if need > free:
            raise UserError(
                f"{gemm} needs about {need / 2**30:.1f} GiB of GPU memory to check and time,"
                f" {free / 2**30:.1f} GiB are free; choose a smaller shape, or end what else runs on the GPU"
            )

    def _needed_bytes(self, gemm: Gemm) -> int:
        inputs, outputs = gemm.m * gemm.k + gemm.k * gemm.n, gemm.m * gemm.n  # elements
        # arena with staging and records, private copies in fp16 and fp32, references in fp64
        plain = 24 * inputs + 40 * outputs + 4 * WORKSPACE_BYTES
        # all cases of the checks, with what is expected of each
        cases = min(CACHE_BYTES["cuda"], CASES * 2 * inputs + CASES * 4 * outputs)
        # shared and private operands of every window, B in both layouts, and what the arena has beside them
        rotating = self.rotated(gemm) * (6 * inputs + 4 * outputs) + 2 * inputs + 2 * WORKSPACE_BYTES
        return plain + cases + rotating

    def rotated(self, task: Task) -> int:
        """So many operands are met in turn where none is to be in the cache when it comes again."""
        return min(MAX_ROTATED, max(2, int(CACHES_ROTATED * self.target.l2_bytes / max(1, task.bytes)) + 1))

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
        other = second_gpu(torch.cuda.device_count())
        told = not isinstance(task, Operation) or not is_foreign(task.name)  # else it would need the file's checkout
        return judge_on(other, task, candidate, FINALS.name) if other and told else None

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        self.builders.build(candidates)  # the cache has them when they are asked for

    def close(self) -> None:
        self._opened.close()


class CudaBench(Bench):
    """The stages for one shape on a GPU."""

    def __init__(self, rig: CudaRig, gemm: Gemm, seed: int, both_layouts: bool) -> None:
        self._rig, self._gemm, self._both_layouts = rig, gemm, both_layouts
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator("cuda").manual_seed(seed)
        self._workspace_bytes = WORKSPACE_BYTES + 16 * gemm.m * gemm.n
        self._rotating: CudaOperands | None = None
        self._operands: CudaOperands | None = None
        with contextlib.ExitStack() as stack:
            rig.libraries.hold(gemm)
            stack.callback(rig.libraries.release, gemm)
            self._arena = stack.enter_context(CudaArena(gemm, self._workspace_bytes, both_layouts=both_layouts))
            self._cases = Cases(gemm, seed, CudaReferences(self._library_outputs))
            stack.callback(self._cases.close)
            self._opened = stack.pop_all()

    def build(self, candidates: Sequence[Candidate]) -> Iterator[Build]:
        return self._rig.builders.build(candidates)

    @torch.inference_mode()
    def verify(self, candidate: Candidate, build: Build, *, full: bool = False) -> Verdict:
        rig = self._rig
        if rig.tunes:
            self._prepare()
        open_session = partial(CudaSession, candidate, build, self._arena, self._cases, rig.facilities)
        verdict = rig.retried(lambda: verify(open_session, all_checks(), full=full))
        if verdict.check == deviation.CHECK.name and not rig.libraries.is_tuned(self._gemm):
            self._prepare()
            self._cases.close()  # the baselines are more, and what they allow may be
            verdict = rig.retried(lambda: verify(open_session, all_checks(), full=full))
        return verdict

    def profile(self, candidate: Candidate, build: Build) -> dict[str, float]:
        plan = contract.plan_cuda(candidate.source, self._gemm, self._rig.target.sms)
        return collect(Path(build.artifact), plan, self._gemm)

    def time(self, candidate: Candidate, build: Build, protocol: Protocol, beat: float = 0.0) -> Timing:
        kernels = {CANDIDATE: Kernel(candidate, build, self._gemm.layout)}
        return self.time_kernels(kernels, protocol, beat)[CANDIDATE]

    def time_baselines(self, protocol: Protocol) -> Timing:
        (timing,) = self.time_kernels({}, protocol).values()
        return timing

    @torch.inference_mode()
    def time_kernels(self, kernels: Mapping[str, Kernel], protocol: Protocol, beat: float = 0.0) -> dict[str, Timing]:
        """Time several kernels of the shape in one run, those that read B in the other layout too.

        By name; without kernels one baseline stands in their place.
        """
        self._prepare()
        assert self._operands is not None
        operands = self._rotating_operands() if protocol.rotates else self._operands
        rig, chosen, terms = self._rig, self._baselines(protocol), Terms(protocol, self._rng, beat, self._rig.clock)
        memory = ProductMemory(operands, rig.libraries)
        return rig.steadily(lambda: rig.retried(lambda: measure_cuda(rig.shared, chosen, kernels, memory, terms)))

    def renew(self) -> None:
        self._rig.workers.renew()

    @torch.inference_mode()
    def redraw(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._generator.manual_seed(seed)  # of timed operands too, which are drawn anew for every run
        self._cases.close()
        self._cases = Cases(self._gemm, seed, self._cases.references)

    def close(self) -> None:
        self._rig.workers.detach()
        for operands in (self._operands, self._rotating):
            if operands:
                operands.close()
                operands.arena.close()
        self._cases.close()
        self._opened.close()

    def _baselines(self, protocol: Protocol) -> Sequence[LibraryProduct]:
        """The baselines to report, the usual strongest first; for searches that one."""
        found = library_baselines(self._rig.libraries, self._gemm)
        if protocol.selects:
            return strongest_first(found, self._gemm)[:1]
        return strongest_first(self._rig.request.reported(found, protocol.name), self._gemm)

    def _prepare(self) -> None:
        """On first use: operands, and cuBLASLt's best algorithms for both layouts."""
        if self._operands is not None:
            return
        operands = CudaOperands(self._arena, self._generator, self._rig.workers.helpers)
        operands.refresh()
        operands.use_other_layout()
        own, other = operands.b(0), operands.other_b[0]
        b_nn, b_tn = (own, other) if self._gemm.layout is Layout.NN else (other, own)
        pointers = (operands.a(0), b_nn, b_tn, operands.output(0))
        buffers = Buffers(*(tensor.data_ptr() for tensor in pointers))
        self._rig.libraries.tune(self._gemm, buffers)
        self._operands = operands

    def _rotating_operands(self) -> CudaOperands:
        if self._rotating is None:
            rotate, both = self._rig.rotated(self._gemm), self._both_layouts
            arena = CudaArena(self._gemm, self._workspace_bytes, rotate=rotate, both_layouts=both)
            try:
                self._rotating = CudaOperands(arena, self._generator, self._rig.workers.helpers)
            except BaseException:
                arena.close()
                raise
        return self._rotating

    def _library_outputs(self, gemm: Gemm, a: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
        """What every NVIDIA library computes for these operands, fp16 M x N each; cuBLASLt's best only if tuned."""
        libraries = self._rig.libraries
        b_nn, b_tn = (b, b.t().contiguous()) if gemm.layout is Layout.NN else (b.t().contiguous(), b)
        outputs = []
        for baseline in library_baselines(libraries, gemm):
            skipped = baseline.tuned and not libraries.is_tuned(gemm)
            if not baseline.compiled and not skipped:  # the compiler's kernels are not NVIDIA's
                output = torch.empty(gemm.m, gemm.n, dtype=torch.float16, device="cuda")
                launch = baseline.launcher(libraries, gemm)
                stream = torch.cuda.current_stream().cuda_stream
                launch(stream, a.data_ptr(), b_nn.data_ptr(), b_tn.data_ptr(), output.data_ptr())
                outputs.append(output)
        torch.cuda.synchronize()
        return outputs
