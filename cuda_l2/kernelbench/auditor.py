"""Judges candidates in KernelBench's own style, ModelNew in a Python file, against one file of a checkout."""

import contextlib
import datetime
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

import cuda_l2
from cuda_l2.kernelbench._base import CaseBook, ModuleSession, module_checks
from cuda_l2.kernelbench.arms import COMPILED, EAGER
from cuda_l2.kernelbench.examined import Readiness
from cuda_l2.kernelbench.onlooker import Onlooker
from cuda_l2.kernelbench.opened import Case, Effort, Entry, References
from cuda_l2.kernelbench.process import Call, Module, Resources
from cuda_l2.kernelbench.rounds import CALLS_BYTES, MOST_CALLS, measure_modules
from cuda_l2.machine.cpu import target as cpu
from cuda_l2.machine.cpu.worker import Fault
from cuda_l2.machine.cuda import target as cuda
from cuda_l2.measure.protocols import CPU_PROTOCOLS, Protocol
from cuda_l2.measure.rounds import CANDIDATE
from cuda_l2.records import Build, BuildStatus, Candidate, Timing, TimingStatus, Trial, Verdict, VerdictStatus
from cuda_l2.reward import count_tokens, reward
from cuda_l2.system import sandbox
from cuda_l2.system.errors import UserError
from cuda_l2.system.lock import machine_lock
from cuda_l2.verify import verify

CLASS = "ModelNew"
BUILD_TIMEOUT_S = 600.0
"""What a file may take to be executed: it compiles its own code then."""
SPARE_ARENA_BYTES = 64 << 20


class Auditor:
    """One file's reference, its cases and baselines, for any number of candidates. A context manager.

    compiled: time against the reference under torch.compile too. UserError where the file cannot be a task on this
    machine.
    """

    def __init__(self, entry: Entry, effort: Effort = Effort(), *, compiled: bool = True) -> None:
        self._effort = effort
        self._arms = (EAGER, COMPILED) if compiled else (EAGER,)
        self._target = cpu.detect() if effort.device == "cpu" else cuda.detect()
        self._stack = contextlib.ExitStack()
        try:
            self._file = self._stack.enter_context(References(effort).open(entry))
            examined = self._file.examine()
            if examined.status is not Readiness.READY or examined.task is None:
                raise UserError(f"{entry.name} is no task here: {examined.status}: {examined.reason}")
            self.task = examined.task
            self._book = CaseBook(self._file, examined)
            self._source = entry.path.read_bytes()
            self._baselines: dict[str, Module] = {}
            self._left_out: dict[str, str] = {}
        except BaseException:
            self.close()
            raise

    def judge(
        self,
        candidate: Candidate,
        protocol: str = "offline",
        *,
        allowed: Collection[str] = (),
        one_shape: bool = False,
        own_weights: bool = False,
        begins: Callable[[str], None] = lambda _: None,
    ) -> Trial:
        """What becomes of a candidate: its file executed, checked, and timed in turn with the reference.

        allowed: PyTorch's operators that it may call, without `aten::`, `torch.compile`, or `all`. one_shape: judge at
        the shape shown alone. own_weights: with the weights that its seed makes, which are neither set nor changed.
        begins: told what of all this begins.
        """
        if protocol not in CPU_PROTOCOLS:
            raise UserError(f"there is no protocol {protocol!r}; choose from {', '.join(CPU_PROTOCOLS)}")
        verdict: Verdict | None = None
        timing: Timing | None = None
        with machine_lock(), self._candidate(candidate.source) as module:
            start = time.perf_counter()
            begins("executing the file")
            failure = module.load(BUILD_TIMEOUT_S)
            build = Build(
                candidate.id,
                BuildStatus.FAILED if failure else BuildStatus.BUILT,
                failure,
                artifact="" if failure else str(module.folder),
                sandbox=str(sandbox.kind()),
                seconds=time.perf_counter() - start,
            )
            if not failure:
                onlooker = Onlooker(module, allowed, self._shown_case, self._candidate)
                session = ModuleSession(module, self._book, onlooker, frozenset(allowed), one_shape, own_weights)
                session.notes += ["judged at one shape alone"] * one_shape
                session.notes += ["judged with the weights that its seed makes alone"] * own_weights
                verdict, timing = self._judged(session, CPU_PROTOCOLS[protocol], begins)
        return Trial(
            task=self.task,
            candidate=candidate,
            machine=self._target.machine,
            protocol=protocol,
            build=build,
            verdict=verdict,
            timing=timing,
            reward=reward(build.status, verdict, timing, count_tokens(candidate.source) if timing else 0),
            environment=self._environment(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        )

    def _judged(
        self, session: ModuleSession, protocol: Protocol, begins: Callable[[str], None]
    ) -> tuple[Verdict, Timing | None]:
        """The verdict, and the timing of what is correct."""
        checks = module_checks()
        verdict = verify(lambda: session, [check for check in checks if not check.late], begins=begins)
        timing: Timing | None = None
        if verdict.status is VerdictStatus.CORRECT:
            begins("the reference as it is timed")
            arms = {**self._timed_baselines(), CANDIDATE: session.module}
            begins("timing")
            set_weights = not session.own_weights
            timing = measure_modules(arms, self._book, protocol, session.onlooker, set_weights=set_weights)
            timing = replace(timing, conditions=replace(timing.conditions, left_out=dict(self._left_out)))
        if timing and timing.status is TimingStatus.MEASURED:
            after = verify(lambda: session, [check for check in checks if check.late], begins=begins)
            verdict = replace(after, passed=verdict.passed + after.passed, seconds=verdict.seconds + after.seconds)
        correct = verdict.status is VerdictStatus.CORRECT
        return replace(verdict, notes=tuple(session.notes)), timing if correct else None

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> "Auditor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _candidate(self, source: str) -> Module:
        return self._module(source.encode(errors="replace"), CLASS)

    def _shown_case(self) -> Case:
        return self._book.get("state 0", weights_seed=13)

    def _module(self, source: bytes, name: str, *, compiled: bool = False) -> Module:
        weights = sum(tensor.bytes for tensor in self.task.weights)
        calls = min(MOST_CALLS * 2 * self.task.bytes, CALLS_BYTES) + 8 * self.task.bytes
        resources = Resources(
            device=self._effort.device,
            threads=cpu.usable_cores(),
            memory_bytes=self._effort.memory_bytes,
            arena_bytes=weights + 2 * calls + SPARE_ARENA_BYTES,
            timeout_s=self._effort.timeout_s,
        )
        return Module(source, name, resources, compiled=compiled)

    def _timed_baselines(self) -> dict[str, Module]:
        """The reference in each of its arms, each in a process of its own; one that fails is left out."""
        for name in self._arms:
            if name in self._baselines or name in self._left_out:
                continue
            module = self._stack.enter_context(self._module(self._source, "Model", compiled=name == COMPILED))
            try:
                self._try(module)
            except Fault as fault:
                if name == EAGER:
                    raise UserError(f"the reference fails where it is timed: {fault.reason}") from None
                self._left_out[name] = fault.reason
                module.close()
                continue
            self._baselines[name] = module
        return self._baselines

    def _try(self, module: Module) -> None:
        case = self._book.get("timed", weights_seed=16)
        failure = module.load(BUILD_TIMEOUT_S)
        if failure:
            raise Fault(VerdictStatus.CRASHED, failure)
        module.make(self._book.weights_seed(16), case.initial)
        module.prepare([Call(case.task, case.tensors, case.numbers)], {})
        module.run()

    def _environment(self) -> dict[str, Any]:
        return self._target.environment() | {
            "torch": torch.__version__,
            "torch_threads": cpu.usable_cores(),
            "cuda_l2": cuda_l2.__version__,
        }
