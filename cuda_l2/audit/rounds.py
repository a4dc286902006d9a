"""Times a module against the reference, eager and compiled, in processes alike: one clock, ours, fresh inputs a round.

A sample is so many calls, each on inputs that its process has not seen. The clock runs until the calls are done and
the device is idle, then on until their results lie in memory that we read. What reading takes longer than it typically
takes for the eager reference counts as work that was put off.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from cuda_l2.audit._base import CaseBook
from cuda_l2.audit.process import Call, Module
from cuda_l2.errors import UserError
from cuda_l2.execute.worker import Fault
from cuda_l2.measure.cpu_rounds import LAST_LEVEL_BYTES
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.rounds import CANDIDATE, Rounds, Terms, failed
from cuda_l2.records import Timing
from cuda_l2.targets import cpu
from cuda_l2.tasks.kernelbench import Case, Tensors
from cuda_l2.tasks.tolerance import Bounds
from cuda_l2.tasks.values import Distribution

MOST_CALLS = 32
CALLS_BYTES = 64 << 20
"""Inputs and results of a sample's calls together take at most this, one call more."""
AT_ONCE = 4
OTHER_INTEGERS = 1e-3
"""Share of integers that may differ from the eager reference's, where rounding decides."""


def measure_module(candidate: Module, baselines: Mapping[str, Module], book: CaseBook, protocol: Protocol) -> Timing:
    """Time a module that was found correct; the reference is the strongest baseline of this run."""
    start = time.perf_counter()
    rounds = _ModuleRounds({**baselines, CANDIDATE: candidate}, book, protocol)
    try:
        rounds.set_up()
        rounds.run()
        empty_call_us = rounds.empty_call_us()
    except (Fault, WrongOutput) as error:
        return failed(error, protocol, start)
    return rounds.timing(empty_call_us, time.perf_counter() - start)


class _ModuleRounds(Rounds):
    def __init__(self, modules: Mapping[str, Module], book: CaseBook, protocol: Protocol) -> None:
        super().__init__(list(modules), Terms(protocol, book.rng))
        self.modules, self.book = modules, book
        self.case: Case = book.get("timed", weights_seed=16)
        self.eager = next(iter(modules))
        self._distribution: Distribution | None = None
        last_level = max(cpu.detect().cache_bytes) or LAST_LEVEL_BYTES
        self._evicted = torch.zeros(2 * last_level, dtype=torch.uint8) if protocol.evict else None  # a GPU's stay
        self._collect_s: dict[int, list[float]] = {}
        self.begin_round()

    def set_up(self) -> None:
        first, second = self._drawn(2)
        if all(torch.equal(tensor, second[name]) for name, tensor in first.items()):
            self._distribution = Distribution.NORMAL  # a file that always gives the same would be known by heart
            self.case = self.book.get("timed", weights_seed=16, distribution=self._distribution)
        for name, module in self.modules.items():
            with _blaming(name):
                module.make(self.book.weights_seed(16), self.case.initial)
                module.prepare([self._call(self.case.tensors)], self._weights())
                module.run()
                module.freeze()

    @property
    def most(self) -> int:
        return max(1, min(MOST_CALLS, CALLS_BYTES // max(1, self.case.task.bytes)))

    def begin_round(self) -> None:
        self._inputs: list[Tensors] = []
        self._used = dict.fromkeys(self.modules, 0)
        self._right: dict[int, Tensors] = {}  # a baseline's results by the number of their inputs
        self._found: dict[int, Tensors] = {}

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        module = self.modules[name]
        with _blaming(name):
            if warm:
                module.prepare([self._call(self._next(name))], {})
                module.run()
            first = self._used[name]
            module.prepare([self._call(self._next(name)) for _ in range(count)], {})
            if self._evicted is not None:
                self._evicted += 1
            time.sleep(float(self.rng.exponential(self.protocol.gap_s)) if self.protocol.gap_s else 0.0)
            spent = module.run()
        kept = self._found if name == CANDIDATE else self._right
        kept.update({first + index: module.output(index) for index in range(count)})
        self._check()
        known = self._collect_s.setdefault(count, [])
        if name == self.eager:
            known.append(spent.collect_s)
        typical = statistics.median(known) if known else 0.0
        return (spent.run_s + max(0.0, spent.collect_s - typical)) / count

    def _check(self) -> None:
        """WrongOutput where a result is not the reference's own for the same inputs, as near as that errs."""
        for index in sorted(set(self._found) & set(self._right)):
            found, right = self._found.pop(index), self._right.pop(index)
            for name, limit in self.case.bounds.items():
                self._require(name, limit, found, right)

    def empty_call_us(self) -> float:
        module = self.modules[CANDIDATE]
        module.prepare([], {})
        return statistics.median(module.run().run_s for _ in range(9)) * 1e6

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
        difference = (found[name].double() - right[name].double()).abs()
        finite = difference[difference.isfinite()]
        largest = float(finite.max()) if finite.numel() else 0.0
        self.differences[CANDIDATE] = max(self.differences.get(CANDIDATE, 0.0), largest)

    def _next(self, name: str) -> Tensors:
        """The round's next inputs, the same for every arm: each process meets them for the first time."""
        number = self._used[name]
        while len(self._inputs) <= number:
            self._inputs += self._drawn(AT_ONCE)
        self._used[name] += 1
        return self._inputs[number]

    def _drawn(self, count: int) -> list[Tensors]:
        seeds = [int(seed) for seed in self.rng.integers(1 << 31, size=count)]
        return self.book.file.inputs(seeds=seeds, sizes=self.book.sizes, distribution=self._distribution)

    def _call(self, tensors: Tensors) -> Call:
        return Call(self.case.task, tensors, self.case.numbers)

    def _weights(self) -> Tensors:
        return {key: self.case.tensors[name] for name, key in self.case.keys.items()}


@contextlib.contextmanager
def _blaming(name: str) -> Iterator[None]:
    """A baseline's faults are no candidate's."""
    try:
        yield
    except Fault as fault:
        if name == CANDIDATE:
            raise
        raise UserError(f"the baseline {name} fails: {fault.reason}") from None
