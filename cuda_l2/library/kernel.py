"""What a search hands out, as a callable on torch tensors: a verified CPU kernel, or torch's own product."""

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import forward_ad

from cuda_l2 import contract, tasks
from cuda_l2.library import saved
from cuda_l2.library.product import ALIGN, Call, Product, empty_call_us
from cuda_l2.library.saved import Saved, TorchsOwn
from cuda_l2.measure.baselines._base import Function
from cuda_l2.records import Build, Candidate, Gemm
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Kept(Call):
    """A product that is saved, pickled and copied. It does not change: a copy is the product itself."""

    why_torch = ""
    """Why it is torch's own product; empty for a kernel of ours."""
    _saved: Saved | TorchsOwn

    def save(self, path: Path | str) -> None:
        """Write what `cuda_l2.load` reads, as JSON: a kernel's source and contract, or torch's product by name."""
        saved.write(self._saved, saved.path_of(path))

    def __reduce__(self) -> tuple[Callable[[str], "Kept"], tuple[str]]:
        return restore, (saved.to_text(self._saved),)

    def __copy__(self) -> "Kept":
        return self

    def __deepcopy__(self, memo: object) -> "Kept":
        return self


class Kernel(Kept, Product):
    """Calls a candidate's compiled code: C = A B.

    The code runs in this process with this process's rights: load only what was verified and whose author you
    trust as far as any native library's. A pickle holds its source.
    """

    _saved: Saved

    def __init__(self, gemm: Gemm, candidate: Candidate, build: Build, machine: str = "") -> None:
        """machine: identity of the one on which the kernel was verified and timed; empty where nobody said."""
        self.candidate, self.artifact, self.machine = candidate, Path(build.artifact), machine
        terms = contract.parse_cpu(candidate.source)
        entry = ctypes.CDLL(str(self.artifact))[terms.entry]
        self._saved = Saved(gemm, candidate, machine)
        super().__init__(gemm, entry, terms.threads, terms.workspace_bytes(gemm))

    def export(self, folder: Path | str, name: str = "") -> Path:
        """Write a shared library and its C header; the library's path. name: of the C function and of both files."""
        return saved.export(self._saved, saved.path_of(folder), name)

    def __repr__(self) -> str:
        advice = "cuda_l2.evaluate(kernel.candidate.source, kernel.gemm) verifies and times it"
        return f"<Kernel {self.candidate.id} for {self.gemm}{'' if self.machine else f', no timing known: {advice}'}>"


class TorchKernel(Kept):
    """Torch's own product, called as a kernel is: what a search hands out where no kernel wins.

    Threads do not wait for one another: each has buffers of its own where the product needs any.
    """

    _saved: TorchsOwn

    def __init__(self, own: TorchsOwn) -> None:
        super().__init__(own.gemm)
        self.name, self.why_torch, self.machine = own.baseline, own.why, own.machine
        self._saved = own
        self._bind, self._local = saved.torch_baseline(own.baseline).bind, threading.local()

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        c = torch.empty_like(self._like_c) if out is None else out
        if not self._ordinary(a, b, c):
            return self._careful_call(a, b, out)
        self._function(a, b, c)
        return c

    __call__.__doc__ = Call.__call__.__doc__

    def _ordinary(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> bool:
        """Whether a call needs none of the careful checks, asked in as few steps as Python allows."""
        for tensor, operand in ((a, self._a), (b, self._b), (c, self._c)):
            if not (
                type(tensor) in PLAIN_TENSORS
                and tensor.dtype is operand.dtype
                and tensor.shape == operand.shape
                and tensor.layout is torch.strided
                and tensor.stride() == operand.strides
                and tensor.is_cpu
            ):
                return False
        if forward_ad._current_level >= 0:
            return False
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or c.requires_grad):
            return False
        try:
            at_a, at_b, at_c = a.data_ptr(), b.data_ptr(), c.data_ptr()
        except RuntimeError:  # inside torch.vmap and the like
            return False
        apart_a = at_c >= at_a + self._a.bytes or at_a >= at_c + self._c.bytes
        apart_b = at_c >= at_b + self._b.bytes or at_b >= at_c + self._c.bytes
        return apart_a and apart_b and not (at_a | at_b | at_c) % ALIGN and bool(at_a and at_b and at_c)

    @property
    def call_overhead_us(self) -> float:
        """What a call costs beside the product, in microseconds."""
        other = TorchKernel(self._saved)
        other._local.function = lambda a, b, c: None
        return empty_call_us(other)

    def export(self, folder: Path | str, name: str = "") -> Path:
        """UserError: there is no kernel."""
        raise UserError(f"there is no kernel to export for {self.gemm}: {self.why_torch}; call {self.name} of torch")

    def _launch(self, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], starts: list[int]) -> None:
        with torch.no_grad():
            self._function(*tensors)

    @property
    def _function(self) -> Function:
        try:
            function: Function = self._local.function
        except AttributeError:
            with torch.inference_mode(False):  # its buffers serve calls in every mode
                function = self._local.function = self._bind(self.gemm)
        return function

    def __repr__(self) -> str:
        return f"<TorchKernel {self.name} for {self.gemm}: {self.why_torch}>"


def load(
    name: Path | str | Gemm | tuple[int, int, int],
    *,
    task: tasks.TaskLike | None = None,
    archive: Place | str | None = None,
) -> Kernel | TorchKernel:
    """A kernel from the file that `Kernel.save` wrote or from its C source, or the archive's best for a shape here.

    name: a path, or a shape as in 512x512x512:tn. task: the shape that a source is for, where its name is not the one
    that a search gave it. archive: its file or a server's URL, where it is not the default one.
    The source is compiled under the rules of the launch contract, and nothing else of the file runs. Loading does not
    verify it. Torch's own product where the file holds that, or no kernel wins by the archive's latest report.
    UserError where there is none of them.
    """
    return _opened(saved.find(name, archive, task))


def restore(text: str) -> Kernel | TorchKernel:
    """What a pickle holds as text; UserError where it cannot be built."""
    return _opened(saved.from_text(text))


def _opened(found: Saved | TorchsOwn) -> Kernel | TorchKernel:
    if isinstance(found, TorchsOwn):
        return TorchKernel(found)
    return Kernel(found.gemm, found.candidate, saved.built(found), found.machine)
