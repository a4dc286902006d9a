"""The recording driver of fake_driver.c in place of libcuda.so.1: the op launches on tensors of this machine's memory."""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

from cuda_l2.library.deploy.calls import op
from cuda_l2.library.deploy.native import Native
from cuda_l2.system.native import compiled

SOURCE = Path(__file__).with_suffix(".c")
STREAM = 0x5EED


class Launch(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_uint * 3) for name in ("grid", "block", "cluster")],
        *[("shared", ctypes.c_uint), ("programmatic", ctypes.c_int)],
        *[(name, ctypes.c_void_p) for name in ("stream", "function", "context")],
        *[(name, ctypes.c_uint64 * 32) for name in ("words", "tails")],
    ]


class Map(ctypes.Structure):
    _fields_ = [
        *[("address", ctypes.c_uint64), ("dims", ctypes.c_uint64 * 5), ("strides", ctypes.c_uint64 * 4)],
        *[
            ("rank", ctypes.c_uint),
            ("box", ctypes.c_uint * 5),
            ("steps", ctypes.c_uint * 5),
            ("enums", ctypes.c_int * 5),
        ],
    ]


class FakeDriver:
    """What the op asked for, and what it is answered. Numbers: the variables of fake_driver.c."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.reset()

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    def reset(self) -> None:
        names = "launch_count map_count module_count fill_count fails capturing exchanged context_sets"
        for name in names.split():
            self[name] = 0
        self["occupancy"] = 1
        self.stream(STREAM)

    def stream(self, number: int) -> None:
        ctypes.c_void_p.in_dll(self.library, "stream").value = number

    def capture(self, number: int) -> None:
        self["capturing"] = int(number > 0)
        ctypes.c_uint64.in_dll(self.library, "capture_id").value = number

    def parameters(self, sizes: Sequence[int]) -> None:
        """Bytes of each parameter of every kernel."""
        (ctypes.c_size_t * 32).in_dll(self.library, "sizes")[: len(sizes)] = list(sizes)
        ctypes.c_size_t.in_dll(self.library, "size_count").value = len(sizes)

    @property
    def launches(self) -> list[Launch]:
        return list((Launch * 64).in_dll(self.library, "launches"))[: self["launch_count"]]

    @property
    def maps(self) -> list[Map]:
        return list((Map * 4096).in_dll(self.library, "maps"))[: self["map_count"]]


@contextlib.contextmanager
def fake_driver(*flags: str) -> Iterator[tuple[FakeDriver, Native]]:
    """The op on the recording driver, with an empty table. flags: of the driver's compiler."""
    path = str(compiled(SOURCE, "-shared", "-fPIC", *flags))
    fake, library = FakeDriver(Path(path)), op()
    assert library
    library.stop()
    assert library.start(path, path, serves_cpu=True) == ""
    try:
        yield fake, library
    finally:
        library.stop()
