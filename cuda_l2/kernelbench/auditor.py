"""Judges candidates in KernelBench's own style, ModelNew in a Python file, against one file of a checkout."""

import contextlib
import datetime
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

import cuda_l2
from cuda_l2.kernelbench._base import ModuleSession, module_checks
from cuda_l2.kernelbench.arms import COMPILED, EAGER
from cuda_l2.kernelbench.cases import ForeignCases
from cuda_l2.kernelbench.checkout import admit, foreign
from cuda_l2.kernelbench.examined import Effort
from cuda_l2.kernelbench.files import Entry
from cuda_l2.kernelbench.process import Module, Resources
from cuda_l2.kernelbench.rounds import CALLS_BYTES, MOST_CALLS, TIMED_WEIGHTS, measure_modules
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu import target as cpu
from cuda_l2.machine.cuda import target as cuda
from cuda_l2.measure.protocols import CPU_PROTOCOLS, Protocol
from cuda_l2.measure.rounds import CANDIDATE
from cuda_l2.records import Build, BuildStatus, Candidate, Timing, TimingStatus, Trial, Trust, Verdict, VerdictStatus
from cuda_l2.system import sandbox
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.lock import machine_lock
from cuda_l2.verify import verify

SPARE_ARENA_BYTES = 64 << 20


class Auditor(Closing):
    """One file's reference, its cases and baselines, for any number of candidates. A context manager.

    compiled: time against the reference under torch.compile too. UserError where the file cannot be a task on this
    machine.
    """

    def __init__(self, entry: Entry, effort: Effort = Effort(), *, compiled: bool = True) -> None:
        self._effort = effort
        self._arms = (EAGER, COMPILED) if compiled else (EAGER,)
        self._target = cpu.detect() if effort.device == "cpu" else cuda.detect()
        self._stack = contextlib.ExitStack()
        self.task = admit(entry, effort, draws_numbers=True)
        self._known = foreign(self.task)
        self._stack.callback(self._known.file.close)
        self._cases = ForeignCases(self.task, secrets.randbits(62))
        self._baselines: dict[str, Module] = {}
        self._left_out: dict[str, str] = {}

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
        """A candidate's file executed, checked, and timed in turn with the reference: a trial of trust level B.

        allowed: PyTorch's operators that it may call, without `aten::`, `torch.compile`, or `all`. one_shape: judge at
        the shape shown alone. own_weights: with the weights that its seed makes, which are neither set nor changed.
        begins: called with the name of each stage.
        """
        if protocol not in CPU_PROTOCOLS:
            raise UserError(f"there is no protocol {protocol!r}; choose from {', '.join(CPU_PROTOCOLS)}")
        verdict: Verdict | None = None
        timing: Timing | None = None
        source = candidate.source.encode(errors="replace")
        begins("executing the file")
        with machine_lock(), self._module(source, "ModelNew") as module:
            start = time.perf_counter()
            failure = ""
            try:
                module.load()
            except Fault as fault:
                failure = fault.reason
            build = Build(
                candidate.id,
                BuildStatus.FAILED if failure else BuildStatus.BUILT,
                failure,
                artifact="" if failure else str(module.folder),
                sandbox=str(sandbox.kind()),
                seconds=time.perf_counter() - start,
            )
            if not failure:
                session = ModuleSession(module, self._cases, frozenset(allowed), one_shape, own_weights)
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
            trust=Trust.B,
            environment=self._environment(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        )

    def _judged(
        self, session: ModuleSession, protocol: Protocol, begins: Callable[[str], None]
    ) -> tuple[Verdict, Timing | None]:
        """The verdict, and the timing of what is correct."""
        checks = module_checks()
        before = [check for check in checks if not check.late or session.module.on_cpu]
        verdict = verify(lambda: session, before, begins=begins)
        timing: Timing | None = None
        if verdict.status is VerdictStatus.CORRECT:
            begins("the reference as it is timed")
            arms = {**self._timed_baselines(), CANDIDATE: session.module}
            begins("timing")
            timing = measure_modules(arms, self._cases, protocol, set_weights=not session.own_weights)
            timing = replace(timing, conditions=replace(timing.conditions, left_out=dict(self._left_out)))
        if timing and timing.status is TimingStatus.MEASURED:
            session.timed = True
            after = verify(lambda: session, [check for check in checks if check.late], begins=begins)
            passed = tuple(dict.fromkeys(verdict.passed + after.passed))
            verdict = replace(after, passed=passed, seconds=verdict.seconds + after.seconds)
        correct = verdict.status is VerdictStatus.CORRECT
        return replace(verdict, notes=tuple(session.notes)), timing if correct else None

    def close(self) -> None:
        self._stack.close()

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
            module = self._stack.enter_context(
                self._module(self._known.file.text.encode(), "Model", compiled=name == COMPILED)
            )
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
        case = self._cases.drawn("timed", weights=TIMED_WEIGHTS)
        module.load()
        module.make(case.weights_seed, case.initial)
        module.prepare([case.call()], {})
        module.run()

    def _environment(self) -> dict[str, Any]:
        return self._target.environment() | {
            "torch": torch.__version__,
            "torch_threads": cpu.usable_cores(),
            "cuda_l2": cuda_l2.__version__,
        }
