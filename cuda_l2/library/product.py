"""C = A B on torch tensors, by a compiled C function: what a call checks, what it costs, gradients."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import sysconfig
import timeit
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from cuda_l2.records import Gemm, Layout
from cuda_l2.system.errors import UserError
from cuda_l2.system.native import compiled

HOST = Path(__file__).with_name("host.c")
CALL = Path(__file__).with_name("call.c")
MODULE = "cuda_l2_call"
ALIGN = 64
WORKSPACE_ALIGN = 4096
COLUMN_MAJOR = (
    "; a is column-major: a.contiguous() copies it; where b and out are column-major too, a kernel for the shape with M"
    " and N exchanged and row-major B takes them as they are"
)
DLPACK_TYPES = {torch.float16: (2, 16), torch.bfloat16: (4, 16)}
"""DLPack's code and bits of an element type."""

QUESTIONS = (
    "_ZN5torch3jit6tracer15getTracingStateEv",
    "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv",
    "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv",
    "_ZN3c108GradMode10is_enabledEv",
    "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE",
)
"""Functions of torch's libraries that say whether torch.jit traces, how many dispatch and function modes are active,
whether gradients are recorded, and whether the thread's calls all go by a dispatch key. Their Python forms cost a call
0.2 us."""

KEYS = (torch._C.DispatchKey.PreDispatch, torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
"""The key of make_fx(pre_dispatch=True), whose modes are not on the stack of the others, and that of torch.func."""

tracing_state = torch._C._get_tracing_state


def dispatch_modes() -> bool:
    """Whether a dispatch mode is active.

    Then, and where tracing_state is not None (torch.jit.trace, make_fx), torch's own operators alone are seen.
    """
    included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
    return torch._C._len_torch_dispatch_stack() > 0 or included(KEYS[0])


def function_modes() -> bool:
    """Whether a TorchFunctionMode is active, but for torch.set_default_device's, which touches new tensors alone."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


class Operand(NamedTuple):
    """What a call demands of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, int]
    strides: tuple[int, int]  # in elements

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


class _Arguments(ctypes.Structure):
    """`struct product` of host.c."""

    _fields_ = (("entry", ctypes.c_void_p), *((size, ctypes.c_int64) for size in "mnk"), ("workspace", ctypes.c_void_p))


class Call(ABC):
    """A matrix product of one shape on torch tensors: what is checked before it runs, and gradients."""

    def __init__(self, gemm: Gemm) -> None:
        self.gemm = gemm
        self._a, self._b, self._c = operands(gemm)
        self._like_c = torch.empty(self._c.shape, dtype=self._c.dtype)  # its pages are never touched

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """C for tensors A (M x K) and B (K x N) of the shape's type; B column-major where the shape says tn.

        ValueError for tensors that do not fit, and for `out` that shares memory with A or B. Gradients flow to A and B
        through products that torch computes; `out` is then refused, as by torch's own functions. Tensors whose
        transposes fit are read as the product of those, C' = B' A', and C is column-major.
        """
        return self._careful_call(a, b, out)

    @abstractmethod
    def _launch(self, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], starts: list[int]) -> None:
        """Write C from A and B, which fit. starts: their addresses."""

    def _careful_call(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Says what is wrong with a call's tensors, records gradients, and calls without the extension."""
        given: list[tuple[Any, Operand]] = [(a, self._a), (b, self._b), *([] if out is None else [(out, self._c)])]
        for tensor, operand in given:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{operand.name} must be a torch tensor, not {type(tensor).__name__}")
        try:
            return self._differentiable_call(a, b, out)
        except ValueError:
            if all(_fits(tensor, operand) for tensor, operand in given) or not self._fit_transposed(a, b, out):
                raise
        return self(b.mT, a.mT, None if out is None else out.mT).mT

    def _fit_transposed(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> bool:
        """Whether C' = B' A' is a product of this shape, with all of it laid out as it must be."""
        fits = _fits(b, _transposed(self._a)) and _fits(a, _transposed(self._b))
        return fits and (out is None or _fits(out, _transposed(self._c)))

    def _differentiable_call(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        wants_gradients = a.requires_grad or b.requires_grad or (out is not None and out.requires_grad)
        if (torch.is_grad_enabled() and wants_gradients) or forward_ad._current_level >= 0:
            if out is not None:
                raise ValueError(
                    "out must be left out where gradients are recorded: call without it, or under torch.no_grad()"
                )
            product: torch.Tensor = _Differentiable.apply(a, b, self)  # type: ignore[no-untyped-call]
            return product
        return self._checked_call(a, b, torch.empty_like(self._like_c) if out is None else out)

    def _checked_call(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """The call without gradients."""
        starts = [_start(tensor, operand) for tensor, operand in ((a, self._a), (b, self._b), (c, self._c))]
        for start, operand in zip(starts[:2], (self._a, self._b), strict=True):
            if start < starts[2] + self._c.bytes and starts[2] < start + operand.bytes:
                raise ValueError(f"out must be apart from {operand.name}: they share memory")
        self._launch((a, b, c), starts)
        return c


class Product(Call):
    """Calls a C function of the launch contract's signature on torch tensors.

    Calls from several threads run one after the other. A forked process starts threads of its own.
    """

    def __init__(self, gemm: Gemm, entry: Any, threads: int, workspace_bytes: int) -> None:
        """entry: a function of a loaded library. threads: on which parallel-for runs."""
        super().__init__(gemm)
        self._entry = entry  # keeps its library loaded
        self._workspace = torch.empty(workspace_bytes + WORKSPACE_ALIGN, dtype=torch.uint8)
        workspace = -(-self._workspace.data_ptr() // WORKSPACE_ALIGN) * WORKSPACE_ALIGN
        self._host = host(threads)
        self._arguments = _Arguments(address_of(entry), gemm.m, gemm.n, gemm.k, workspace)
        self._quick_call = self._in_c()

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        done = self._quick_call(a, b, out)
        return self._careful_call(a, b, out) if done is None else done

    @property
    def call_overhead_us(self) -> float:
        """What a call costs beside the kernel, in microseconds."""
        return overhead_us(self.gemm)

    def _in_c(self) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None]:
        """The call in C, which returns None where anything is out of the ordinary."""
        module = extension()
        if module is None:
            return lambda a, b, c: None
        addresses = address_of(self._host.product_call), ctypes.addressof(self._arguments)
        sizes = ((*operand.shape, *operand.strides, operand.bytes) for operand in (self._a, self._b, self._c))
        dtype = DLPACK_TYPES[self._a.dtype]
        call: Callable[..., torch.Tensor | None] = module.Call(*addresses, self._like_c, *dtype, *sizes)
        return call

    def _launch(self, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], starts: list[int]) -> None:
        """The call through ctypes."""
        torch.autograd.graph.increment_version(tensors[2])
        error = self._host.product_call(ctypes.byref(self._arguments), *map(ctypes.c_void_p, starts))
        if error:
            raise OSError(error, os.strerror(error))


class _Differentiable(torch.autograd.Function):
    """The kernel's product, with torch's own products for the gradients."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, product: Call) -> torch.Tensor:
        return product._checked_call(a, b, torch.empty_like(product._like_c))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, Call], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        a, b = ctx.saved_tensors
        wanted_a, wanted_b, _ = ctx.needs_input_grad
        return grad @ b.mT if wanted_a else None, a.mT @ grad if wanted_b else None, None

    @staticmethod
    def jvp(ctx: Any, tangent_a: torch.Tensor | None, tangent_b: torch.Tensor | None, _: None) -> Any:
        a, b = ctx.saved_tensors
        if tangent_a is None or tangent_b is None:
            return a @ tangent_b if tangent_a is None else tangent_a @ b
        return tangent_a @ b + a @ tangent_b


def operands(gemm: Gemm) -> tuple[Operand, Operand, Operand]:
    """A, B and C as a kernel of this shape takes them."""
    a, b, c = (*gemm.inputs, *gemm.outputs)
    strides_b = (gemm.n, 1) if gemm.layout is Layout.NN else (1, gemm.k)
    return (
        Operand("a", getattr(torch, a.dtype), (gemm.m, gemm.k), (gemm.k, 1)),
        Operand("b", getattr(torch, b.dtype), (gemm.k, gemm.n), strides_b),
        Operand("out", getattr(torch, c.dtype), (gemm.m, gemm.n), (gemm.n, 1)),
    )


@functools.cache
def host(threads: int) -> ctypes.CDLL:
    """A thread pool for each thread count; a copy of the library for each, since its state is static."""
    return ctypes.CDLL(str(compiled(HOST, "-shared", "-fPIC", "-pthread", f"-DPOOL_THREADS={threads}")))


@functools.cache
def overhead_us(gemm: Gemm) -> float:
    """What a call costs beside the kernel, in microseconds: the least of 50 means over calls of an empty function."""
    empty = Product(gemm, host(1).product_empty, 1, 0)
    return empty_call_us(empty)


def empty_call_us(empty: Call) -> float:
    """The least of 50 means over calls of a product that computes nothing, in microseconds."""
    a, b, c = (torch.empty_strided(x.shape, x.strides, dtype=x.dtype) for x in operands(empty.gemm))
    return min(timeit.repeat(lambda: empty(a, b, c), number=100, repeat=50)) / 100 * 1e6


def _start(tensor: torch.Tensor, operand: Operand) -> int:
    """Address of a tensor's first element; ValueError where it does not fit."""
    name, dtype, shape, strides = operand
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, not {tensor.layout}")
    if not _fits(tensor, operand):
        raise ValueError(
            f"{name} must be a CPU tensor of {dtype}, shape {shape} and strides {strides},"
            f" not of {tensor.dtype} on {tensor.device}, shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            + (COLUMN_MAJOR if name == "a" and _fits(tensor, operand._replace(strides=(1, operand.shape[0]))) else "")
        )
    if tensor.is_neg():
        raise ValueError(f"{name} must hold its values as they are; {name}.resolve_neg() does")
    try:
        start = tensor.data_ptr() if tracing_state() is None and not dispatch_modes() else 0
    except RuntimeError:  # inside torch.vmap and the like
        start = 0
    if start in (0, tensor.storage_offset() * tensor.element_size()):  # the offset from null: a storage without memory
        raise ValueError(f"{name} must have memory of its own; call torch.matmul in vmap, a trace, a dispatch mode")
    if start % ALIGN:
        raise ValueError(f"{name} must begin at a multiple of {ALIGN} bytes; {name}.clone() does")
    return start


def _fits(tensor: torch.Tensor, operand: Operand) -> bool:
    """Whether a tensor has the type, the shape and the layout, wherever it begins."""
    _, dtype, shape, strides = operand
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype is dtype
        and tuple(tensor.shape) == shape
        and all(size == 1 or stride == want for size, stride, want in zip(shape, tensor.stride(), strides, strict=True))
    )


def _transposed(operand: Operand) -> Operand:
    return operand._replace(shape=operand.shape[::-1], strides=operand.strides[::-1])


def torchs(name: str, library: str = "libtorch_cpu.so") -> int:
    """The address of a function of one of torch's libraries; AttributeError or OSError where there is none."""
    return address_of(ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / library))[name])


def address_of(function: Any) -> int:
    """The address of a function of a loaded library."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def carried_call() -> Path:
    """Where a wheel has the compiled call.c; the name says of which sources and for which Python."""
    sources = b"".join(path.read_bytes() for path in (CALL, CALL.parent / "deploy" / "tensor.h"))
    return CALL.with_name(f"call-{hashlib.sha256(sources).hexdigest()[:16]}-{_abi()}.so")


def built_call() -> Path:
    """call.c compiled for this Python, in the cache; UserError where it cannot be."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise UserError(f"{include}/Python.h is missing: install Python's headers, as in apt install python3-dev")
    return compiled(CALL, "-shared", "-fPIC", f"-I{include}", f"-DPYTHON_ABI={_abi()}")


def _abi() -> str:
    return str(sysconfig.get_config_var("SOABI"))


@functools.cache
def extension() -> ModuleType | None:
    """The module that calls quickly, of call.c; None, after one warning, where it cannot be had."""
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    try:
        if exchange is None:
            raise UserError(f"torch {torch.__version__} lacks DLPack's C functions: install torch 2.10 or newer")
        carried = carried_call()
        loader = ExtensionFileLoader(MODULE, str(carried if carried.exists() else built_call()))
        spec = importlib.util.spec_from_loader(MODULE, loader)
        assert spec
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        module.setup(
            *(torch.Tensor, torch.nn.Parameter, DeviceContext, exchange),
            *(torch.empty_like, torch._C._increment_version, torch._C._get_function_stack_at),
            *(vars(forward_ad), torch._C.TensorBase.requires_grad, torch._C.TensorBase.is_neg),
            *map(torchs, QUESTIONS),
            *(key.value for key in KEYS),
        )
    except (UserError, ImportError, RuntimeError, AttributeError, TypeError, OSError) as error:
        warnings.warn(f"calls of kernels are several microseconds slower: {error}", RuntimeWarning, stacklevel=2)
        return None
    return module
