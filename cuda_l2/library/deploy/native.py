"""The op's shared library: found in the package or compiled once, loaded into torch, and what Python may ask of it."""

import ctypes
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cuda_l2.library.deploy.entries import Key
from cuda_l2.library.product import address_of, extension, torchs
from cuda_l2.system.errors import UserError
from cuda_l2.system.native import compiled

SOURCE = Path(__file__).with_name("op.cpp")
DRIVER, TORCH_CUDA = "libcuda.so.1", "libtorch_cuda.so"
ABI = "0x0209000000000000"
"""Version of torch's stable ABI: 2.9."""
WRAP, AUTOCASTS = "_Z16THPVariable_WrapRKN2at10TensorBaseE", "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE"
"""torch's functions that make an object of Python of a tensor, and say whether autocast is on for a kind of device."""
COUNTS = ("launched", "vendor", "encoded", "resolved", "allocated", "read_ahead")
MAX_REASON = 512
_BEGIN = ctypes.CFUNCTYPE(None)
_RESOLVE = ctypes.CFUNCTYPE(None, *[ctypes.c_int32] * 4, *[ctypes.c_int64] * 3)


@functools.cache
def carried() -> Path:
    """Where a wheel has it; the name says of which sources, so that another version's is never loaded."""
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    return SOURCE.with_name(f"op-{hashlib.sha256(b''.join(path.read_bytes() for path in sources)).hexdigest()[:16]}.so")


def build() -> Path:
    """The library compiled by the C++ compiler, in the cache; UserError where it cannot be."""
    root = Path(torch.__file__).parent
    flags = ("-shared", "-fPIC", f"-DTORCH_TARGET_VERSION={ABI}", f"-I{root / 'include'}", f"-L{root / 'lib'}")
    return compiled(SOURCE, *flags, "-ltorch_cpu", "-ldl")


class Native:
    """The loaded library. `torch.ops.cuda_l2` exists from then on, and serves by torch alone until it is started."""

    def __init__(self, path: Path) -> None:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        self._library = ctypes.CDLL(str(path))
        size = ctypes.c_size_t
        self._library.cuda_l2_put.argtypes = [
            *(ctypes.c_char_p, size, ctypes.c_uint64, ctypes.c_char_p),
            *(ctypes.c_char_p, size),
        ]
        self._library.cuda_l2_start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, size]
        self._library.cuda_l2_mark.restype = ctypes.c_uint64
        self._library.cuda_l2_release.argtypes = [ctypes.c_uint64]
        self._library.cuda_l2_constant.argtypes = self._library.cuda_l2_variable.argtypes = [ctypes.c_void_p]
        self._library.cuda_l2_bare.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int]
        self._resolve: object = None

    def start(self, driver: str = DRIVER, torch_cuda: str = TORCH_CUDA, *, serves_cpu: bool = False) -> str:
        """Find the driver; why there is none, or empty. serves_cpu: tensors on the CPU too, in tests."""
        reason = ctypes.create_string_buffer(MAX_REASON)
        self._library.cuda_l2_start(driver.encode(), torch_cuda.encode(), serves_cpu, reason, MAX_REASON)
        return reason.value.decode(errors="replace")

    def on_first(self, begin: Callable[[], None]) -> None:
        """What is called, once, when a tensor on a CUDA device comes up; it may start the library."""
        self._begin = _BEGIN(begin)
        self._library.cuda_l2_begin(self._begin)

    def on_miss(self, resolve: Callable[[Key], None]) -> None:
        """What is called, once, for each shape that the table does not have; it may put something there."""
        function = _RESOLVE(lambda *key: resolve(key))
        self._library.cuda_l2_resolve(function)
        self._resolve = function  # C++ holds no reference

    def put(self, plan: bytes, name: str, cubin: bytes) -> str:
        """Serve a shape by a kernel. name: 16 hex digits of the cubin. Why it cannot be, or empty."""
        reason = ctypes.create_string_buffer(MAX_REASON)
        self._library.cuda_l2_put(plan, len(plan), int(name, 16), cubin, reason, MAX_REASON)
        return reason.value.decode(errors="replace")

    def clear(self) -> None:
        """Forget every shape."""
        self._library.cuda_l2_clear()

    def constant(self, tensor: int) -> None:
        """Let launches read a tensor, by its _cdata, ahead of the launch before them where nothing wrote it since."""
        self._library.cuda_l2_constant(tensor)

    def variable(self, tensor: int) -> None:
        """Let no launch read a tensor ahead, by what its _cdata was."""
        self._library.cuda_l2_variable(tensor)

    def invalidate(self) -> None:
        """Constant tensors may have been written: the next launch on each takes an ordinary edge."""
        self._library.cuda_l2_invalidate()

    def mark(self) -> int:
        """For `release`."""
        return int(self._library.cuda_l2_mark())

    def release(self, mark: int) -> None:
        """Free the workspaces of graphs that were captured since a mark. Those graphs must be gone."""
        self._library.cuda_l2_release(mark)

    def bare(self, key: Key, addresses: Sequence[int], stream: int, repeats: int) -> bool:
        """Launch a shape's kernel on a, b and c without torch; false where none serves it, or it needs a workspace."""
        place, sizes = (ctypes.c_int32 * 4)(*key[:4]), (ctypes.c_int64 * 3)(*key[4:])
        return not self._library.cuda_l2_bare(place, sizes, (ctypes.c_uint64 * 3)(*addresses), stream, repeats)

    def stop(self) -> None:
        """Forget the driver, and who is asked; nothing may be under way."""
        self._library.cuda_l2_stop()
        self._library.cuda_l2_resolve(None)
        self._resolve = None

    def quick(
        self, recorded: Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor], *, transposed: bool
    ) -> Callable[..., torch.Tensor | None] | None:
        """A product, or linear where transposed, without torch's dispatcher: what it costs is mostly the launch.

        It takes a, b and maybe out. It returns None for all but plain tensors that a kernel serves: torch.ops has to
        serve those. recorded(a, b, transposed) makes the product, and records it, where gradients are wanted. There is
        none where Python's headers, a C compiler or a function of torch's is missing.
        """
        module = extension()
        try:
            of_torch = torchs(WRAP, "libtorch_python.so"), torchs(AUTOCASTS)
        except (AttributeError, OSError):
            return None
        own = self._library.cuda_l2_serve, self._library.cuda_l2_serves, self._library.cuda_l2_wrapped
        return module.Served(*map(address_of, own), *of_torch, recorded, transposed) if module else None

    def counts(self) -> dict[str, int]:
        """Numbers of launches, calls that torch served, tensor maps encoded, shapes asked for, workspaces made.

        And of launches that read weights ahead.
        """
        numbers = (ctypes.c_uint64 * len(COUNTS))()
        self._library.cuda_l2_counts(numbers)
        return dict(zip(COUNTS, numbers, strict=True))


@functools.cache
def native() -> Native:
    """The library, loaded once a process; UserError where it can be neither found nor compiled."""
    if carried().exists():
        try:
            return Native(carried())
        except OSError:
            pass  # built for another processor or C library
    try:
        return Native(build())
    except OSError as error:
        raise UserError(f"the op of cuda-l2 cannot be loaded: {error}") from None
