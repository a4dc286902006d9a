"""The CPU this process runs on."""

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cuda_l2 import contract
from cuda_l2.build.cpu import build_all
from cuda_l2.machine.cpu import target as cpu
from cuda_l2.machine.cpu.arena import Arena, CandidateMemory
from cuda_l2.machine.cpu.target import CpuTarget, available_memory_bytes
from cuda_l2.machine.cpu.worker import Worker
from cuda_l2.measure.baselines._base import Baseline, strongest_first
from cuda_l2.measure.clock import CLOCK
from cuda_l2.measure.cpu_rounds import Contestant, measure_cpu
from cuda_l2.measure.operands import Operands, open_operands, slots_for
from cuda_l2.measure.protocols import CPU_PROTOCOLS, Protocol
from cuda_l2.measure.rounds import LEAST_ROUNDS, Kernel, Limits, Terms
from cuda_l2.measure.torch_baselines import HostBaselines, TorchBaselines
from cuda_l2.measure.tuned import ADAPTIVE
from cuda_l2.records import Build, Candidate, Task, Timing, TimingStatus, Verdict
from cuda_l2.rigs._base import Bench, Request, Rig
from cuda_l2.rigs.kept import KeptBaselines
from cuda_l2.system import variables
from cuda_l2.system.errors import UserError
from cuda_l2.tasks.kinds import kind_of
from cuda_l2.verify import all_checks, verify
from cuda_l2.verify._cpu import CpuSession, launch_timeout_s

MOST_MODELS = 4
"""KernelBench files whose processes are kept for the next kernel; each has two Pythons with torch loaded."""
CRAWLS = "one launch takes many seconds on this processor, which has no arithmetic in fp16"
MOST_REPORTED_S, MOST_TRIED_S = 4.5, 0.3
"""Seconds of a baseline's launch at most, in a report and in a search."""
SLOWER = "slower by far on this processor, which has no arithmetic in fp16"
PAIRS = LEAST_ROUNDS
"""Pairs of processes, torch's and the candidate's, that a report's rounds go round. A process of torch's may be slow as
long as it lives, which no number of its rounds shows; fewer pairs leave no 95 % interval."""
TORCH_BYTES = 256 << 20
"""What a process of torch's may take; 155 MB were seen."""
WORKSPACE_BYTES, WORKSPACE_BYTES_A_CORE = 64 << 20, 4 << 20


class CpuRig(Rig):
    """Candidates in sandboxed processes, torch's baselines in another."""

    target: CpuTarget
    suffix = ".c"
    builds_disturb = True

    def __init__(self, request: Request = Request()) -> None:
        if request.tuning != ADAPTIVE:
            raise UserError("only a GPU's libraries choose among algorithms; --tuning needs one")
        if request.choices:
            raise UserError("only a GPU's libraries choose among algorithms; --choices needs one")
        self.request = request
        self.target = cpu.detect()
        self.target.ceilings()  # measured while the machine is still idle
        self.protocols = CPU_PROTOCOLS
        self.baselines = TorchBaselines(self.target.cores)
        kept: KeptBaselines[HostBaselines] = KeptBaselines(
            self.baselines, lambda kind, task: kind.host_baselines(task, self.target.cores), MOST_MODELS
        )
        self.baselines_of, self._close_baselines = kept.of, kept.close
        self._threads = torch.get_num_threads()
        torch.set_num_threads(self.target.cores)  # references on all cores

    def open(self, task: Task, seed: int, *, both_layouts: bool = False) -> Bench:
        self.require_feasible(task)
        return CpuBench(self, task, seed)

    def require_feasible(self, task: Task) -> None:
        need, available = kind_of(task).host_bytes(task) + WORKSPACE_BYTES, available_memory_bytes()
        if need > available:
            raise UserError(
                f"{task} needs about {need / 2**30:.1f} GiB of memory to check and time,"
                f" {available / 2**30:.1f} GiB are free; choose smaller sizes"
            )

    def environment(self) -> dict[str, Any]:
        return self.target.environment() | {
            "torch": importlib.metadata.version("torch"),
            "torch_threads": self.target.cores,
            **variables.recorded(),
        }

    def close(self) -> None:
        torch.set_num_threads(self._threads)
        self._close_baselines()


class CpuBench(Bench):
    """The stages for one task on the CPU."""

    def __init__(self, rig: CpuRig, task: Task, seed: int) -> None:
        self._rig, self._task = rig, task
        self._strongest = ""
        """The baseline that searches of a product compare with: the strongest beside the first kernel."""
        self._draw(seed)

    def _draw(self, seed: int) -> None:
        """Cases, memory for their shapes, and what is timed."""
        task = self._task
        self._rng = np.random.default_rng(seed)
        self._cases = kind_of(task).cases(task, seed)
        outputs = sum(tensor.bytes for tensor in task.outputs)
        self._arena = Arena(
            [task, *self._cases.others, *self._cases.far],
            slots=slots_for(task),
            workspace_bytes=WORKSPACE_BYTES + WORKSPACE_BYTES_A_CORE * self._rig.target.cores + 4 * outputs,
        )
        self._operands: Operands | None = None
        self._others: list[TorchBaselines] = []
        """Further processes of torch's, opened for the first report."""

    def build(self, candidates: Sequence[Candidate]) -> Iterator[Build]:
        return iter(build_all(candidates, self._rig.target))

    def verify(self, candidate: Candidate, build: Build, *, full: bool = False) -> Verdict:
        return verify(partial(CpuSession, candidate, build, self._arena, self._cases), all_checks(), full=full)

    def time_kernels(
        self, kernels: Mapping[str, Kernel], protocol: Protocol, limits: Limits = Limits()
    ) -> dict[str, Timing]:
        task, arena = self._task, self._arena
        arena.select(task)
        if self._operands is None:
            self._operands = open_operands(arena, self._cases, self._rng)
        operands = self._operands
        paired = bool(kernels) and task.product and not (protocol.selects or protocol.mean or protocol.fresh)
        ready, conditions = self._ready(protocol)
        began = CLOCK.now()
        processes = [self._rig.baselines_of(task), *(self._more_processes() if paired else ())]
        limits = replace(limits, within_s=limits.within_s - (CLOCK.now() - began))
        arms: list[dict[str, Contestant]] = [{each.name: those.arm(each) for each in ready} for those in processes]
        parsed = {name: contract.parse_cpu(kernel.candidate.source) for name, kernel in kernels.items()}
        operands.workspace_bytes = max((terms.workspace_bytes(task) for terms in parsed.values()), default=0)
        opened = {name: self._opener(kernel.build, parsed[name], operands) for name, kernel in kernels.items()}
        terms = Terms(protocol, self._rng, limits)
        timings = measure_cpu(opened, arms, operands, terms, launch_timeout_s(task, arena.slots))
        if protocol.selects and task.product and kernels:
            measured = (timing.reference for timing in timings.values() if timing.status is TimingStatus.MEASURED)
            self._strongest = next(measured, self._strongest)
        return {
            name: replace(timing, conditions=replace(timing.conditions, **conditions))
            for name, timing in timings.items()
        }

    def _opener(self, build: Build, terms: contract.CpuContract, operands: Operands) -> Callable[[], Worker]:
        """Opens what launches a candidate where it is timed."""
        memory = CandidateMemory(self._arena, terms)

        def open_worker() -> Worker:
            self._arena.poison_workspace(operands.workspace_bytes)
            return Worker(memory, Path(build.artifact), terms)

        return open_worker

    def _ready(self, protocol: Protocol) -> tuple[list[Baseline], dict[str, Any]]:
        """The baselines to time, the usual strongest first, and what a reader of their times needs."""
        task = self._task
        baselines = self._rig.baselines_of(task)
        if baselines.arena is not self._arena:
            # what another case's tolerance allows may be less than PyTorch's own error on this one
            baselines.attach(self._arena, None if task.product else self._cases.exactly(self._cases.timed(0)))
        # where there is no candidate the first stands in its place
        ready = strongest_first(baselines.ready(compiles=not protocol.selects), task)
        left_out = dict(baselines.left_out)
        if task.product:
            if not protocol.selects:
                ready = self._rig.request.reported(ready)
            elif self._strongest:
                ready = [each for each in ready if each.name == self._strongest]
            if protocol.selects or not self._rig.request.baselines:
                most_s = MOST_TRIED_S if protocol.selects else MOST_REPORTED_S
                slow = [each for each in ready if each.slow_s(task, self._rig.target.extensions) > most_s]
                left_out |= dict.fromkeys((each.name for each in slow), SLOWER if protocol.selects else CRAWLS)
                ready = [each for each in ready if each not in slow]
        return ready, {"left_out": left_out, **baselines.conditions}

    def _more_processes(self) -> list[TorchBaselines]:
        """Those of torch's beside the first; none where memory does not suffice for all of them."""
        missing = PAIRS - 1 - len(self._others)
        if missing * TORCH_BYTES > available_memory_bytes():
            return []
        for _ in range(missing):  # they load side by side
            self._others.append(TorchBaselines(self._rig.target.cores))
        for other in self._others:
            if other.arena is not self._arena:
                other.attach(self._arena)
        return self._others

    def renew(self) -> None:
        """Every session and every timing has a process of its own anyway."""

    def redraw(self, seed: int) -> None:
        self.close()
        self._draw(seed)

    def close(self) -> None:
        while self._others:
            self._others.pop().close()
        self._cases.close()
        self._arena.close()
