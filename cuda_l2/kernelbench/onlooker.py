"""Looks at a module while it runs for what it leaves to PyTorch: in its check, and on the instance that is timed.

The profiler's word is that of the module's own process. So program counters are sampled from outside too, in runs like
those that are timed: on the CPU what is inside PyTorch's libraries is seen there. Tensors are made there as well,
which is most of what a small task takes: a module that makes its results and computes nothing is sampled beside the
candidate, and what it spends inside PyTorch is taken off. Kernels of operators that compute are told by their names in
the library, and nobody runs them who leaves PyTorch nothing: of them a few samples suffice. On a GPU most time goes by
in the driver: there launches are counted by who calls, and the profiler must see what PyTorch's libraries launch. It is
asked that after the timing, and operators are an execution trace's before: the profiler brings CUPTI into a process
that has CUDA, which stays and may take time at every launch.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cuda_l2.kernelbench.launches import GRAPH
from cuda_l2.kernelbench.opened import Case
from cuda_l2.kernelbench.process import Call, Launched, Module, Watched
from cuda_l2.kernelbench.samples import Samples
from cuda_l2.kernelbench.symbols import Functions, functions
from cuda_l2.machine.cpu.worker import Fault
from cuda_l2.records import VerdictStatus
from cuda_l2.system.errors import UserError
from cuda_l2.verify._base import CheckFailed

SAMPLING_S, MOST_SAMPLING_S = 2.0, 12.0
LEAST_SAMPLES, SUSPECT_SAMPLES = 100, 400
"""In code that computes. The second where some lie inside PyTorch: of 100, a share of 0.4 errs by 0.05."""
CALLS_SAMPLED, SAMPLED_BYTES = 32, 64 << 20
FEWEST_SAMPLES, SURE_DEVIATIONS = 20, 3.0
"""Where threads mostly wait, or the machine is busy, there are few: what counts is what they are sure of."""
TOLD_SHARE, MOST_SHARE = 0.1, 0.3
"""Of computing time in PyTorch's libraries: said from the first on, forbidden beyond the second where no operator was
seen. Filling and copying do not count."""
MOST_IN_KERNELS = 2
"""Samples in kernels of operators that compute, where no operator was seen. Of 27,000 of honest files none was."""
COMPILER = "torch.compile"
COUNTED_RUNS, COUNTING_S = 4, 4.0
MOST_HIDDEN = 0.25
"""Launches a call that the profiler did not see. None are there where nobody hides: what a call does at first, as
growing a workspace, has been done."""
_TORCH = re.compile(r"/lib(torch_cpu|torch_cuda\w*|torch|mkl\w*|dnnl|openblas\w*|cublas\w*|cudnn\w*)[\w.-]*\.so")
_WAITING = re.compile(r"/lib(gomp|c|m|pthread|stdc\+\+|python[\w.]*|torch_python|c10\w*)\.so|/python[\d.]*$|/ld-|^\[v")
"""Waiting, the interpreter, memory: of whoever called."""
EMPTY = """
import time

import numpy
import torch

OTHER = numpy.arange(1000, dtype=numpy.float32)


def made(shape, dtype):
    if dtype == "bfloat16":
        return torch.empty(shape, dtype=torch.bfloat16)
    return torch.from_numpy(numpy.empty(shape, dtype))


class ModelNew:
    def __init__(self, *_, **__):
        pass

    def __call__(self, *inputs):
        for value in inputs:
            if isinstance(value, torch.Tensor):
                value.contiguous().data_ptr()
                if value.dtype is not torch.bfloat16:
                    value.numpy()
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            OTHER.max(), OTHER.argmax()
        return [RESULTS]
"""
"""Tensors by way of NumPy where it has the type: nobody needs to take more than that of PyTorch to compute elsewhere.
And as long as the candidate something that is not PyTorch's: PyTorch's own code takes half as long again where caches
have held other code in between.
"""
MOST_BESIDE_US = 1000.0
"""Longer work holds no more of the caches."""
MOST_SLOWER = 2.0
"""A busy machine may be so much slower in a look at the candidate than it was in looks at what computes nothing."""
LOADING_S = 60.0
FREE = set(
    re.findall(
        r"\w+",
        """
        empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros zero_ ones
        ones_like new_ones full full_like new_full fill_ copy_ clone contiguous to _to_copy cuda cpu detach
        detach_ alias lift lift_fresh view _unsafe_view reshape _reshape_alias view_as reshape_as as_strided
        as_strided_ flatten unflatten squeeze squeeze_ unsqueeze unsqueeze_ t transpose permute movedim
        swapaxes mT expand expand_as slice select narrow split chunk unbind unsafe_split split_with_sizes
        diagonal resize_ set_ size stride numel is_contiguous data_ptr item _local_scalar_dense is_nonzero
        record_stream pin_memory is_pinned result_type resolve_conj resolve_neg requires_grad_ scalar_tensor
        is_same_size sym_size sym_numel sym_stride storage_offset data set_data
        """,
    )
)
"""Operators that make, move or look at tensors and compute nothing."""
_LIBRARY = "libtorch_cpu.so"
_MAKING = rb"(11fill_kernel|11copy_kernel|18direct_copy_kernel|24reduced_float_copy_kernel)"
"""Functions that fill and copy, in the names of that library. Where it was stripped they count as work."""
_KERNELS = (
    rb"2at6native\d+(DEFAULT|AVX|SVE|VSX|ZVECTOR)|2at6native12_GLOBAL__N_1\w*_kernel|"
    rb"mkl_(blas|vml|dft|vsl|lapack|sparse)_|4dnnl4impl|6fbgemm"
)
"""Functions that operators compute in, those that fill and copy among them: code that is compiled for each kind of
processor, and the libraries linked in. Where it was stripped there are none."""


class Onlooker:
    """Of one candidate. beside: opens another file's ModelNew in such a process. case: what is computed.

    allowed: PyTorch's operators that it may call, without `aten::`, `torch.compile`, or `all`.
    """

    def __init__(
        self, module: Module, allowed: Collection[str], case: Callable[[], Case], beside: Callable[[str], Module]
    ) -> None:
        self._module, self._allowed, self._case, self._beside = module, allowed, case, beside
        self._free: _Spent | None = None
        self._spent: list[_Spent] = []
        self._launched: list[tuple[Sequence[Call], Launched]] = []

    def look(self, calls: Sequence[Call], looks: int) -> None:
        """Watch these calls, and sample them for its part of so many looks; CheckFailed where that is not allowed."""
        if "all" in self._allowed:
            return
        self._module.prepare(calls, {})
        self.require_allowed(left_to_pytorch(self.watched()))
        if not self._allowed and self._module.on_cpu:
            self.sample(looks)
        elif not self._allowed and (launched := self._module.launched(COUNTED_RUNS, COUNTING_S / looks)):
            self._launched.append((calls, launched))

    def watched(self) -> Watched:
        """PyTorch's operators in what the module is prepared for, with times on a CPU."""
        return self._module.profile() if self._module.on_cpu else self._module.operators()

    def require_allowed(self, operators: Sequence[str]) -> None:
        """CheckFailed where one is not."""
        forbidden = [name for name in operators if name not in self._allowed]
        if forbidden and "all" not in self._allowed:
            raise CheckFailed(VerdictStatus.FORBIDDEN, f"calls {listed(forbidden)}; allow them where that is meant")

    def sample(self, looks: int = 1) -> None:
        """Where it is, on a CPU, as it runs what it is prepared for again and again.

        Nothing where no threads can be traced.
        """
        self._spent.append(_spent(self._module, MOST_SAMPLING_S, looks))

    def require_seen(self) -> None:
        """Nothing is timed in the process afterwards: the profiler watches what was looked at on a GPU, call for call.

        CheckFailed for operators that are not allowed, and for launches in a look that it does not see.
        """
        for calls, launched in self._launched:
            self._module.prepare(calls, {})
            self._module.run()  # what a call does when it sees its inputs for the first time was not counted either
            watched = self._module.profile(gpu=True, reading=True)
            self.require_allowed(left_to_pytorch(watched))
            if hidden_launches(launched, watched) > MOST_HIDDEN:
                reason = "launches kernels of PyTorch's libraries beside the operators that its profiler sees"
                if not watched.kernels:
                    count = launched.counts.total() / launched.calls
                    reason = f"launched {count:.3g} kernels a call, of which PyTorch's profiler sees none"
                raise CheckFailed(VerdictStatus.FORBIDDEN, reason)

    def require_own_work(self) -> str:
        """What to say of the time inside PyTorch in the samples since the last time, or nothing.

        CheckFailed where it is too much. Of few samples in code that computes what is sure counts, of fewer nothing.
        """
        spent, self._spent = _together(self._spent), []
        if spent.in_kernels > MOST_IN_KERNELS and not self._allowed:
            seen = f"{spent.in_kernels} of {spent.samples} samples, seen from outside, where no profiler watches"
            raise CheckFailed(VerdictStatus.FORBIDDEN, f"is in kernels of PyTorch's operators in {seen}")
        if spent.samples < FEWEST_SAMPLES or spent.share() < TOLD_SHARE:
            return ""  # taking off only makes it less
        if self._free is None:
            self._free = self._making(spent.outside_us)
        inside = spent.share(self._free, SURE_DEVIATIONS if spent.samples < LEAST_SAMPLES else 0.0)
        if inside < TOLD_SHARE:
            return ""
        told = f"spends {inside:.0%} of its time inside PyTorch's libraries, seen from outside"
        if inside > MOST_SHARE and not self._allowed:
            raise CheckFailed(VerdictStatus.FORBIDDEN, f"{told}, where no profiler watches")
        return told

    def _making(self, outside_us: float) -> "_Spent":
        """Of a call that makes results, and works for so long on something beside PyTorch."""
        case = self._case()
        try:
            with self._beside(_making_results(case, outside_us)) as empty:
                if failure := empty.load(LOADING_S):
                    raise Fault(VerdictStatus.CRASHED, failure)
                empty.make(0, case.initial)
                empty.prepare(calls_sampled(case), {})
                return _spent(empty, MOST_SAMPLING_S / 2, 1)
        except Fault as fault:  # no candidate's
            raise UserError(f"a module that computes nothing fails beside the candidate: {fault.reason}") from None


@dataclass(frozen=True, slots=True)
class _Spent:
    """Microseconds of processor time a call: in PyTorch's libraries, and in other code that computes.

    samples: in both. in_kernels: those in kernels of PyTorch's operators, but not in what fills and copies.
    """

    inside_us: float = 0.0
    outside_us: float = 0.0
    samples: int = 0
    in_kernels: int = 0

    def share(self, free: "_Spent | None" = None, deviations: float = 0.0) -> float:
        """Of what computes, what is inside PyTorch beyond what is free: what took so long beside as much other work.

        deviations: the share that lies at least there by so many standard deviations of the samples' numbers.
        """
        inside, outside, taken = self.inside_us, self.outside_us, 0.0
        if free:
            slower = outside / free.outside_us if free.outside_us else 1.0
            taken = free.inside_us * min(MOST_SLOWER, max(1.0, slower))
        sample_us = (inside + outside) / self.samples if self.samples else 0.0
        beyond = max(0.0, inside - taken - deviations * math.sqrt((inside + taken) * sample_us))
        return beyond / (beyond + outside + deviations * math.sqrt(outside * sample_us)) if beyond else 0.0


def computing_operators(watched: Watched) -> tuple[list[str], float]:
    """PyTorch's operators that compute, and what share of the time they take."""
    names = [name for name in watched.operators if name not in FREE]
    return names, min(1.0, sum(watched.operators[name] for name in names) / max(watched.total_us, 1e-3))


def what_is_left(watched: Watched) -> list[str]:
    """What to say of the operators that compute, or nothing."""
    computing, share = computing_operators(watched)
    return [f"leaves {share:.0%} of its time to PyTorch's own {listed(computing)}"] if computing else []


def left_to_pytorch(watched: Watched) -> list[str]:
    """PyTorch's operators that compute, and its compiler where that made kernels."""
    return [*computing_operators(watched)[0], *([COMPILER] if watched.compiled else [])]


def hidden_launches(launched: Launched, watched: Watched) -> float:
    """Launches a call that the profiler did not see in the same calls: PyTorch's of kernels, and anyone's of graphs.

    A graph that is seen has kernels that are seen, by name. What is in one that is not nobody can tell.
    """
    kernels = graphs = 0
    for (caller, entry), count in launched.counts.items():
        if GRAPH in entry:
            graphs += count
        elif _TORCH.search(caller):
            kernels += count
    seen = watched.launches, watched.graph_launches
    return sum(max(0.0, count / launched.calls - told) for count, told in zip((kernels, graphs), seen, strict=True))


def calls_sampled(case: Case) -> list[Call]:
    """As many as a timed sample has, on one case."""
    calls = max(1, min(CALLS_SAMPLED, SAMPLED_BYTES // max(1, case.task.bytes)))
    return [Call(case.task, case.tensors, case.numbers)] * calls


def _spent(module: Module, most_s: float, looks: int) -> _Spent:
    """Of what the module is prepared for, in one of so many looks."""
    _named()  # takes a second the first time, which would be the sampler's
    sampled = module.sampled(SAMPLING_S / looks, most_s / looks, lambda counts: enough_samples(counts, looks))
    if not sampled or not sampled.counts:
        return _Spent()
    inside, outside, in_kernels = _computing(sampled.counts)
    us = sampled.cpu_s * 1e6 / sampled.counts.total() / sampled.calls
    return _Spent(inside * us, outside * us, inside + outside, in_kernels)


def _together(looks: Sequence[_Spent]) -> _Spent:
    """The mean of looks that saw something; of all their samples."""
    seen = [look for look in looks if look.samples] or [_Spent()]
    inside, outside = (sum(times) / len(seen) for times in ([s.inside_us for s in seen], [s.outside_us for s in seen]))
    samples, in_kernels = (sum(counts) for counts in ([s.samples for s in seen], [s.in_kernels for s in seen]))
    return _Spent(inside, outside, samples, in_kernels)


def _computing(counts: Samples) -> tuple[int, int, int]:
    """Samples of code that computes: in PyTorch's libraries, elsewhere, and of the first in operators' kernels."""
    making, kernels = _named()
    inside = outside = in_kernels = 0
    for (path, offset), count in counts.items():
        if _TORCH.search(path):
            known = Path(path).name == _LIBRARY
            if not known or offset not in making:
                inside += count
                in_kernels += count if known and offset in kernels else 0
        elif not _WAITING.search(path):
            outside += count
    return inside, outside, in_kernels


def _named() -> tuple[Functions, Functions]:
    """PyTorch's functions that fill and copy, and those that operators compute in."""
    library = Path(torch.__file__).with_name("lib") / _LIBRARY
    return functions(library, _MAKING), functions(library, _KERNELS)


def enough_samples(counts: Samples, looks: int) -> bool:
    """Whether one of so many looks has its part of what tells a share inside PyTorch from another.

    One sample in a kernel of PyTorch's asks for more.
    """
    inside, outside, in_kernels = _computing(counts)
    if 0 < in_kernels <= MOST_IN_KERNELS:
        return False
    suspect = inside > TOLD_SHARE * (inside + outside)
    return looks * (inside + outside) >= (SUSPECT_SAMPLES if suspect else LEAST_SAMPLES)


def _making_results(case: Case, outside_us: float) -> str:
    """A module that looks at its inputs, works on something else, and gives results in which nothing was written."""
    results = ", ".join(f"made({list(t.shape)}, {t.dtype!r})" for t in case.task.outputs)
    return EMPTY.replace("RESULTS", results).replace("SECONDS", f"{min(outside_us, MOST_BESIDE_US) * 1e-6:.9f}")


def listed(names: Sequence[str]) -> str:
    return ", ".join(name if name == COMPILER else f"aten::{name}" for name in names[:8])
