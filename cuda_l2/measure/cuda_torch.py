"""What torch offers for one product: torch.matmul and torch.compile's max-autotune, launched on device addresses."""

import contextlib
import functools
import importlib.util
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cuda_l2.machine.tensors import dtype_of
from cuda_l2.measure.cublas import Launch
from cuda_l2.measure.launches import wait
from cuda_l2.records import Accumulate, Gemm, Layout

COMPILE_TIMEOUT_S = 300


def switches(gemm: Gemm, *, default: bool = False) -> dict[str, bool]:
    """torch.backends.cuda.matmul's switches: the Gemm's class, or as torch comes."""
    fp16 = gemm.accumulate is Accumulate.FP16
    return {
        "allow_fp16_reduced_precision_reduction": fp16 or default,
        "allow_bf16_reduced_precision_reduction": default,
        "allow_fp16_accumulation": fp16,
    }


def facts(gemm: Gemm, *, default: bool = False) -> dict[str, Any]:
    """torch's version and switches, for the record of a baseline."""
    return {"library": f"torch {torch.__version__}", "switches": switches(gemm, default=default)}


def torch_matmul(gemm: Gemm, *, default: bool = False) -> Launch:
    """torch.matmul into C, B in the Gemm's layout."""
    operands, settings = _operands(gemm), switches(gemm, default=default)

    def launch(stream: int, a: int, b_nn: int, b_tn: int, c: int) -> None:
        first, second, out = operands(a, b_nn, b_tn, c)
        with torch.inference_mode(), torch.cuda.stream(_external(stream)), _set(settings):
            torch.matmul(first, second, out=out)

    return launch


class Compiled:
    """torch.compile's max-autotune of `a @ b`: what Inductor chose, Triton or ATen, run as its own code runs it.

    Whatever the code allocates comes from a pool of its own, which nothing else may use while graphs of it live.
    """

    def __init__(self, gemm: Gemm, stream: int) -> None:
        self._operands, self._settings = _operands(gemm), switches(gemm)
        self._pool = torch.cuda.MemPool()
        self._product = InPlace(gemm)
        a, b, c = random_operands(gemm)
        torch.cuda.synchronize()
        addresses = a.data_ptr(), b.data_ptr(), b.data_ptr(), c.data_ptr()
        with torch.cuda.stream(_external(stream)), _set(self._settings):
            # compiles, outside the pool: autotuning allocates a lot
            self._product(*self._operands(*addresses))
        self.launch(stream, *addresses)
        wait(stream)

    @property
    def copies(self) -> bool:
        """Whether the result had to be copied to C, which costs time that a user does not spend."""
        return not self._product.in_place

    def launch(self, stream: int, a: int, b_nn: int, b_tn: int, c: int) -> None:
        operands = self._operands(a, b_nn, b_tn, c)
        with torch.cuda.stream(_external(stream)), torch.cuda.use_mem_pool(self._pool), _set(self._settings):
            self._product(*operands)


class InPlace:
    """Compiled `a @ b` that returns its result in a given tensor.

    Inductor's code allocates its result itself. An `out=` argument makes it compute elsewhere and copy, which
    `c = a @ b` does not; so its allocation function is told where the next result lies. Where that finds no use, the
    result is copied.
    """

    def __init__(self, gemm: Gemm) -> None:
        self._function = _compile(gemm)
        self._compiled = self.in_place = False

    def __call__(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        if not self._compiled:
            with _quiet():
                self._function(a, b)
            _redirect(c.device.type)
            self._compiled = True
        _pending.append(c)
        try:
            result = self._function(a, b)
        finally:
            _pending.clear()
        self.in_place = result.data_ptr() == c.data_ptr()
        if not self.in_place:
            c.copy_(result)


_pending: list[torch.Tensor] = []
"""Where the next tensor of this shape and type is to lie; at most one."""


def _redirect(device: str) -> None:
    """Make the modules that Inductor wrote allocate through `_pending`."""
    from torch._inductor.codecache import PyCodeCache  # noqa: PLC0415

    name = f"empty_strided_{device}"
    for module in PyCodeCache.modules:
        original = getattr(module, name, None)
        if original is None or isinstance(original, _Allocate):
            continue
        setattr(module, name, _Allocate(original))


class _Allocate:
    """Inductor's allocation function for a device, or the pending tensor where it fits."""

    def __init__(self, original: Callable[..., torch.Tensor]) -> None:
        self._original = original

    def __call__(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if _pending:
            c = _pending[0]
            if (tuple(size), tuple(stride), dtype) == (tuple(c.shape), c.stride(), c.dtype):
                return _pending.pop()
        return self._original(size, stride, dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what autotuning says of every configuration that does not fit."""
    logger = logging.getLogger("torch._inductor.select_algorithm")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def can_compile() -> bool:
    """Whether Inductor has Triton to compile with. PyTorch's own question loads the compiler, which takes seconds."""
    return importlib.util.find_spec("triton") is not None


def random_operands(gemm: Gemm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B as it lies in memory, and C; standard normal."""
    b_shape = (gemm.k, gemm.n) if gemm.layout is Layout.NN else (gemm.n, gemm.k)
    a, b, c = (
        torch.empty(shape, dtype=dtype_of(gemm), device="cuda")
        for shape in ((gemm.m, gemm.k), b_shape, (gemm.m, gemm.n))
    )
    return a.normal_(), b.normal_(), c


def _compile(gemm: Gemm) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    from torch._inductor import config, list_mode_options  # noqa: PLC0415 - only where asked for

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    # Dynamo counts recompilations by code object and gives up after eight: every product has one of its own
    product.__code__ = product.__code__.replace(co_name="product_" + re.sub(r"\W", "_", str(gemm)))
    options = list_mode_options("max-autotune-no-cudagraphs")
    wanted = {
        "precompilation_timeout_seconds": COMPILE_TIMEOUT_S,
        "autotune_num_choices_displayed": 0,
        "max_autotune_report_choices_stats": False,
    }
    options |= {name: value for name, value in wanted.items() if hasattr(config, name)}
    compiled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.compile(
        product, options=options, dynamic=False, fullgraph=True
    )
    return compiled


class _Raw:
    """Device memory as torch reads it in: contiguous 16-bit words."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<i2",  # there is no text for bf16
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def _operands(gemm: Gemm) -> Callable[[int, int, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views of A, B as K x N and C from a launch's addresses; kept: making them takes longer than a small launch."""
    m, n, k, row_major = gemm.m, gemm.n, gemm.k, gemm.layout is Layout.NN

    @functools.lru_cache(maxsize=64)
    def views(a: int, b: int, c: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        b_shape = (k, n) if row_major else (n, k)
        first, second, out = (
            torch.as_tensor(_Raw(address, shape), device="cuda").view(dtype_of(gemm))
            for address, shape in ((a, (m, k)), (b, b_shape), (c, (m, n)))
        )
        return first, second if row_major else second.t(), out

    return lambda a, b_nn, b_tn, c: views(a, b_nn if row_major else b_tn, c)


@contextlib.contextmanager
def _set(settings: dict[str, bool]) -> Iterator[None]:
    module = torch.backends.cuda.matmul
    before = {name: getattr(module, name) for name in settings}
    for name, value in settings.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@functools.lru_cache(maxsize=8)
def _external(stream: int) -> torch.cuda.Stream:
    """The stream of a handle, the default one's too: ExternalStream(0) would be one of torch's pool."""
    return torch.cuda.get_stream_from_external(stream)
