"""Times a module against the reference, eager and compiled, in processes alike: one clock, ours, fresh inputs a round.

A sample is a number of calls, each on inputs that its process has not seen; on a CPU they are written when the results
of the call before were read. Calls that do not count come first: a process is slow at first after it was stopped, by
other amounts each time. What a round needs is prepared before it and looked at after it, and its calls come in parts,
all arms by turns in each: a core that others share is as fast for two samples only where little lies between them. The
clock runs until the call is done and the device is idle, then on until its results lie in memory that we read. What
reading takes longer than it typically takes for the baselines counts as work that was put off. What this conversation
takes where nothing is called, in the baselines' processes, is taken off every arm.

At random rounds the weights of the timed instance change in place, in all arms. On a CPU its inputs must stay as they
were.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cuda_l2.kernelbench.cases import ForeignCases
from cuda_l2.kernelbench.opened import ForeignCase
from cuda_l2.kernelbench.process import Module, Spent
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu import target as cpu
from cuda_l2.measure.cpu_rounds import LAST_LEVEL_BYTES
from cuda_l2.measure.other_work import OtherWork
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.rounds import CANDIDATE, Rounds, Terms, failed
from cuda_l2.records import Conditions, Timing
from cuda_l2.system.errors import UserError
from cuda_l2.tasks._base import Tensors
from cuda_l2.tasks.tolerance import Bounds

MOST_CALLS = 32
CALLS_BYTES = 64 << 20
"""Inputs and results of a round's calls that count take together at most this, one call more."""
PARTS = 4
"""Parts of a round, each with at least as many calls that count as lead it. On one H100 samples 65 ms apart said little
of each other (a correlation of 0.1 to 0.3), parts of 6 calls that lay 3 to 6 ms apart did (0.4 to 0.7)."""
LEADING = 2
"""Calls before these that do not count. On one H200 the first after a stop took 3 to 5 times as long as those that came
later, and of calls of nothing the first two took milliseconds now and then, the others 20 us."""
LEAST_S = 1e-6
"""Least time of a call, once the conversation is taken off: Python calls nothing in less."""
TIMED_WEIGHTS, WEIGHTS = 16, 3
CHANGED_SHARE = 1 / 3
"""The number of the first weights, how many there are, and the share of rounds that begin with other ones, beside one
of the first rounds."""
OTHER_INTEGERS = 1e-3
"""Share of integers that may differ from the eager reference's, where rounding decides."""


def measure_modules(
    modules: Mapping[str, Module], cases: ForeignCases, protocol: Protocol, *, set_weights: bool = True
) -> Timing:
    """Time a module that was found correct, the candidate among these; the reference is the strongest of the others.

    set_weights: the same in all, and others at times; else those that each made from its seed.
    """
    start, others = time.perf_counter(), None if protocol.selects else OtherWork()
    rounds = _ModuleRounds(modules, cases, protocol, set_weights)
    try:
        rounds.set_up()
        rounds.run()
    except (Fault, WrongOutput) as error:
        return failed(error, protocol, start)
    finally:
        rounds.release()
    timing = rounds.timing(rounds.empty_call_us(), time.perf_counter() - start)
    return replace(timing, conditions=Conditions(other_work=others.found() if others else None))


class _ModuleRounds(Rounds):
    def __init__(
        self, modules: Mapping[str, Module], cases: ForeignCases, protocol: Protocol, set_weights: bool
    ) -> None:
        super().__init__(list(modules), Terms(protocol, cases.rng))
        self.modules, self._source, self._set_weights = modules, cases, set_weights
        self._surely_changed = int(self.rng.integers(1, protocol.min_rounds + 1))
        self.cases = [cases.drawn("timed", weights=TIMED_WEIGHTS)]
        """With other weights each; of this round, and of the last that each module has."""
        self.case = self.cases[0]
        self._has: dict[str, ForeignCase] = {}
        last_level = max(cpu.detect().cache_bytes) or LAST_LEVEL_BYTES
        self._evicted = torch.zeros(2 * last_level, dtype=torch.uint8) if protocol.evict else None  # a GPU's stay
        cores = cpu.separate_cores()
        self._core = cores[-2] if len(cores) > 1 else None
        """Ours while a sample is taken. Where the scheduler had both on one core a call of 15 us took 40."""
        on_gpu = not next(iter(modules.values())).on_cpu
        self._theirs = {cores[-1]} if on_gpu else os.sched_getaffinity(0) - {self._core}
        """Where the modules' first threads may run, on a GPU without moving; on a CPU others begin as they do."""
        self._collect_s: dict[bool, list[float]] = {True: [], False: []}
        self._empty_s: dict[bool, list[float]] = {True: [], False: []}
        """Seconds of the baselines' calls, by whether leading calls came before; taken before the candidate's."""
        self.begin_round()

    def set_up(self) -> None:
        for name, module in self.modules.items():
            with _blaming(name):
                module.make(self.case.weights_seed, self.case.initial)
                self._prepare(name, 1, leads=False)
                module.take_turns()
            if self._core is not None:
                module.pin(self._theirs)
        keys = set(self.case.keys.values())
        named = keys <= self.modules[CANDIDATE].state  # others come from the seed it was made under
        if self._set_weights and keys and named:
            for number in range(TIMED_WEIGHTS + 1, TIMED_WEIGHTS + WEIGHTS):
                other = self._source.drawn("timed", weights=number)
                self.cases.append(replace(other, tensors={name: other.tensors[name] for name in other.keys}))

    def release(self) -> None:
        """Let modules run on every core again."""
        for module in self.modules.values() if self._core is not None else ():
            module.pin(os.sched_getaffinity(0))

    @property
    def most(self) -> int:
        return max(1, min(MOST_CALLS, CALLS_BYTES // max(1, self.case.task.bytes)))

    def parts(self, count: int) -> int:
        return max(1, min(PARTS, count // LEADING))

    def begin_round(self, names: Collection[str] = (), count: int = 0) -> None:
        self._inputs: list[Tensors] = []
        self._used = dict.fromkeys(self.modules, 0)
        self._ahead: dict[str, list[tuple[int, int]]] = {}
        """Prepared calls of each module that did not count yet: their numbers there, and those of their inputs."""
        self._right: dict[int, Tensors] = {}  # a baseline's results by the number of their inputs
        self._found: dict[int, Tensors] = {}
        others = [case for case in self.cases if case is not self.case]
        if others and (self.number == self._surely_changed or self.rng.random() < CHANGED_SHARE):
            self.case = others[int(self.rng.integers(len(others)))]
        for name in names:
            self._prepare(name, count)

    def end_round(self) -> None:
        """Compare what was timed: results, and on a CPU the inputs."""
        candidate = self.modules[CANDIDATE]
        if self._found and candidate.on_cpu:
            candidate.require_untouched()
        self._check()

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        module = self.modules[name]
        alone = len(self._ahead.get(name, ())) < count  # outside of rounds
        if alone:
            self._prepare(name, count, leads=warm)
        now, self._ahead[name] = self._ahead[name][:count], self._ahead[name][count:]
        leading = [0] * min(LEADING, self.most) if warm else []
        order = leading + [index for index, _ in now]
        with _blaming(name):
            spent = self._turns(module, order, leading=len(leading), before=self._before)
            if name != CANDIDATE:
                self._collect_s[warm].append(spent.collect_s / count)
                empty = self._turns(module, order, empty=True, leading=len(leading))
                self._empty_s[warm].append(empty.run_s / count)
        kept = self._found if name == CANDIDATE else self._right
        kept.update({number: module.output(index) for index, number in now})
        if alone:
            self.end_round()
        collect_s, empty_s = (_typical(known[warm] or known[False]) for known in (self._collect_s, self._empty_s))
        put_off_s = max(0.0, spent.collect_s / count - collect_s)
        return max(LEAST_S, spent.run_s / count + put_off_s - empty_s)

    def _turns(self, module: Module, order: Sequence[int], **how: Any) -> Spent:
        """Turns of a module while the judge keeps to a core of its own, where there is one."""
        if self._core is None:
            return module.take_turns(order, **how)
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._core})
        try:
            return module.take_turns(order, **how)
        finally:
            os.sched_setaffinity(0, everywhere)

    def _before(self) -> None:
        """Clear the caches and pause as the protocol has it before a call."""
        if self._evicted is not None:
            self._evicted += 1
        time.sleep(float(self.rng.exponential(self.protocol.gap_s)) if self.protocol.gap_s else 0.0)

    def _prepare(self, name: str, count: int, *, leads: bool = True) -> None:
        """So many calls of a module, with the round's weights. leads: one before them that leads their samples."""
        first, self._used[name] = self._used[name], self._used[name] + leads + count
        inputs = self._inputs_up_to(self._used[name])[first:]
        self._ahead[name] = [(index, first + index) for index in range(int(leads), leads + count)]
        has, self._has[name] = self._has.get(name), self.case
        weights = self.case.weights if self._set_weights and has is not self.case else {}
        with _blaming(name):
            self.modules[name].prepare([self.case.call(tensors) for tensors in inputs], weights, turns=True)

    def _check(self) -> None:
        """WrongOutput where a result is not the reference's own for the same inputs, as near as that errs."""
        for index in sorted(set(self._found) & set(self._right)):
            found, right = self._found.pop(index), self._right.pop(index)
            for output, limit in zip(self.case.task.outputs, self.case.bounds, strict=True):
                self._require(output.name, limit, found, right)

    def empty_call_us(self) -> float:
        """Microseconds that were taken off a call."""
        return _typical(self._empty_s[True]) * 1e6

    def _require(self, name: str, limit: Bounds, found: Tensors, right: Tensors) -> None:
        if not limit.dtype.is_floating_point:
            differ = found[name] != right[name]
            if int(differ.sum()) > 1 + OTHER_INTEGERS * differ.numel():
                raise WrongOutput(f"a timed call's {name} is not its own: {int(differ.sum())} elements differ")
            return
        near = replace(
            limit,
            exact=right[name].double(),
            free=limit.free & False,
            rms_allowed=limit.rms_allowed + limit.eager_rms,
            max_allowed=limit.max_allowed + limit.eager_max,
        )
        wrong = near.violation(found[name])
        if wrong:
            raise WrongOutput(f"a timed call did not give its own result: {name} {wrong}")
        _, largest = near.errors(found[name])
        self.differences[CANDIDATE] = max(self.differences.get(CANDIDATE, 0.0), largest)

    def _inputs_up_to(self, count: int) -> list[Tensors]:
        """The round's inputs, the same for every arm: each process meets them for the first time.

        The file draws all that are missing in one run.
        """
        if missing := max(0, count - len(self._inputs)):
            self._inputs += self._source.fresh([int(seed) for seed in self.rng.integers(1 << 31, size=missing)])
        return self._inputs[:count]


def _typical(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) if seconds else 0.0


@contextlib.contextmanager
def _blaming(name: str) -> Iterator[None]:
    """A baseline's faults are no candidate's."""
    try:
        yield
    except Fault as fault:
        if name == CANDIDATE:
            raise
        raise UserError(f"the baseline {name} fails: {fault.reason}") from None
