"""The runtime's own CUDA kernels (cuda_helpers.cu), and what launching them is for."""

import ctypes
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cuda.bindings import driver

from cuda_l2.machine.cuda.driver import Graph, check, device_attribute, launch_config
from cuda_l2.system import paths, scratch

if TYPE_CHECKING:
    import torch  # the worker's process does without it

SOURCE = Path(__file__).with_name("helpers.cu")
LOCAL_BYTES = 256, 512, 1024, 2048, 4096, 8192, 16384
"""Bytes a thread that are spoilt: at most twice what a kernel has, since 16 KiB a thread are 4.1 GiB on an H100."""
NAMES = (
    *("empty", "slow_copy", "occupy", "spoil_shared", "spoil_behind", "settle", "relay", "fill_segments"),
    *("look_at_segments", "look_at_rows", "compare_rows", *(f"spoil_local_{size}" for size in LOCAL_BYTES)),
)
EMPTY_LAUNCHES = 64
MAX_BLOCKS = 1024
ROW_THREADS = 256
SETTLING_LAUNCHES = 4
SYSTEM_SHARED_BYTES = 1024
"""Shared memory that every block takes from the multiprocessor beside what it asks for."""
PROGRAMMATIC = 9
"""Devices of this major capability and later launch dependent kernels early."""


@dataclass(frozen=True)
class Projection:
    """What rows of C times signs are to be; rounding times a row's norm, and summation, is what they may be off by."""

    signs_N: "torch.Tensor"  # fp32
    expected_M: "torch.Tensor"  # fp32
    rounding: float
    summation: float


@dataclass(frozen=True)
class _Grid:
    """A launch's blocks in two dimensions, its threads a block, and how it is launched."""

    blocks: int
    threads: int
    rows: int = 1
    shared_bytes: int = 0
    programmatic: bool = False

    def config(self, stream: int) -> driver.CUlaunchConfig:
        grid, block = (self.blocks, self.rows, 1), (self.threads, 1, 1)
        made = launch_config(grid, block, self.shared_bytes, programmatic=self.programmatic)
        made.hStream = driver.CUstream(stream)
        return made


class Helpers:
    """The compiled kernels in the current context."""

    def __init__(self, cubin: Path) -> None:
        module = check("cuModuleLoadData", driver.cuModuleLoadData(cubin.read_bytes()))
        self._functions = {
            name: check("cuModuleGetFunction", driver.cuModuleGetFunction(module, name.encode())) for name in NAMES
        }
        self.sms = device_attribute("MULTIPROCESSOR_COUNT")
        self._shared_bytes = device_attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for name in ("spoil_shared", "spoil_behind"):
            check("cuFuncSetAttribute", driver.cuFuncSetAttribute(self._functions[name], most, self._shared_bytes))
        self._programmatic = device_attribute("COMPUTE_CAPABILITY_MAJOR") >= PROGRAMMATIC
        self._empties: Graph | None = None
        self._alone: Graph | None = None
        self._configs: dict[tuple[int, _Grid], driver.CUlaunchConfig] = {}

    def slow_copy(self, stream: int, source: int, target: int, words: int, ns: int) -> None:
        """Copy 16-byte words after a while, having let a dependent kernel begin at once."""
        self._launch("slow_copy", stream, _Grid(8, 256), [source, target, words, ns])

    def relay(self, stream: int, *, programmatic: bool) -> None:
        """Let a dependent kernel begin at once, and end after the kernel ahead.

        programmatic: begin before that one has ended.
        """
        self._launch("relay", stream, _Grid(1, 32, programmatic=programmatic and self._programmatic))

    def occupy(self, stream: int, share: float, ns: int, traffic: tuple[int, int] = (0, 0)) -> None:
        """Hold a share of the multiprocessors for so long; traffic: address and bytes of what they read and write."""
        values = [ns, traffic[0], traffic[1] // 16]
        grid = _Grid(max(1, int(self.sms * share)), 1024, shared_bytes=48 << 10)
        self._launch("occupy", stream, grid, values)

    def spoil_shared(self, stream: int, word: int) -> None:
        """Leave a 32-bit word all over the shared memory and the registers of every multiprocessor, once it is free."""
        size = self._shared_bytes
        self._launch("spoil_shared", stream, _Grid(self.sms, 1024, shared_bytes=size), [word, size])

    def spoil_local(self, stream: int, word: int, size: int) -> None:
        """The same all over local memory, of kernels that have `size` bytes a thread; of more than 16 KiB a part."""
        if size:
            enough = next((most for most in LOCAL_BYTES if size <= most), LOCAL_BYTES[-1])
            self._launch(f"spoil_local_{enough}", stream, _Grid(2 * self.sms, 1024), [word])

    def spoil_behind(self, stream: int, word: int, rounds: int) -> None:
        """The same wherever a multiprocessor has half of its shared memory to give for a moment, so many times over."""
        size = ((self._shared_bytes + SYSTEM_SHARED_BYTES) // 2 - SYSTEM_SHARED_BYTES) // 128 * 128
        self._launch("spoil_behind", stream, _Grid(2 * self.sms * rounds, 512, shared_bytes=size), [word, size])

    def fill_segments(self, stream: int, table: ctypes.Structure, count: int, most: int) -> None:
        """Fill `count` pieces of memory of at most so many bytes; see `segments`."""
        self._launch("fill_segments", stream, _Grid(_blocks(most), 256, count), table=table)

    def look_at_segments(
        self, stream: int, table: ctypes.Structure, count: int, most: int, values: Sequence[int]
    ) -> None:
        """Compare them, and copy more; see `segments`."""
        self._launch("look_at_segments", stream, _Grid(_blocks(most), 256, count + 1), values, table)

    def look_at_rows(
        self,
        stream: int,
        results: "Sequence[torch.Tensor]",
        projections: Sequence[Projection],
        found_L4: "torch.Tensor",
    ) -> None:
        """How far each row of fp16 or bf16 results times the signs is off, in units of what it may be off by.

        projections: of each result; the same signs and units. found_L4 (fp32, of zeros): each result's first two
        numbers become the sum of their squares, and the largest. The stream must be torch's current one.
        """
        first, (rows, columns) = projections[0], results[0].shape
        import torch  # noqa: PLC0415

        at = [[c.data_ptr(), each.expected_M.data_ptr()] for c, each in zip(results, projections, strict=True)]
        at_L2 = torch.tensor(at, dtype=torch.int64, device=found_L4.device)
        values = [at_L2.data_ptr(), rows, columns, _is_bf16(results[0]), first.signs_N.data_ptr()]
        values += [_bits(first.rounding), _bits(first.summation), found_L4.data_ptr()]
        self._launch("look_at_rows", stream, _Grid(_row_blocks(rows), ROW_THREADS, len(results)), values)

    def compare_rows(
        self,
        stream: int,
        c: "torch.Tensor",
        numbers_R: "torch.Tensor",
        reference_RN: "torch.Tensor",
        found: "torch.Tensor",
    ) -> None:
        """Differences of an fp16 or bf16 result's rows from fp32 ones.

        numbers_R: int64, which rows. found (2, fp32, of zeros) gets the sum of their squares, and the largest.
        """
        count, columns = reference_RN.shape
        values = [c.data_ptr(), count, columns, _is_bf16(c)]
        values += [numbers_R.data_ptr(), reference_RN.data_ptr(), found.data_ptr()]
        self._launch("compare_rows", stream, _Grid(_row_blocks(count), ROW_THREADS), values)

    def settle(self, stream: int) -> None:
        """Bring back the state in which a context launches fastest.

        Measured on one H200: once a kernel has let dependents begin early and none was there (some of cuBLASLt's do),
        every later launch of the context takes 0.18 us longer, until programmatic launches have overlapped.
        """
        if self._programmatic:
            for _ in range(SETTLING_LAUNCHES):
                self._launch("settle", stream, _Grid(self.sms, 32, programmatic=True))

    def empty_s(self, stream: int) -> float:
        """Device seconds of an empty kernel among many in a graph."""

        def enqueue(stream: int) -> None:
            for _ in range(EMPTY_LAUNCHES):
                self._launch("empty", stream, _Grid(1, 32))

        self._empties = self._empties or Graph(stream, enqueue)
        self.settle(stream)
        return min(self._empties.time() for _ in range(5)) / EMPTY_LAUNCHES

    def empty_graph(self, stream: int) -> Graph:
        """One empty kernel as a graph."""
        self._alone = self._alone or Graph(stream, lambda s: self._launch("empty", s, _Grid(1, 32)))
        return self._alone

    def _launch(
        self, name: str, stream: int, grid: _Grid, values: Sequence[int] = (), table: ctypes.Structure | None = None
    ) -> None:
        """Launch a helper kernel, whose parameters are the table, where there is one, and 64-bit values."""
        words = (ctypes.c_uint64 * max(1, len(values)))(*values)
        places = [ctypes.addressof(table)] if table else []
        places += [ctypes.addressof(words) + 8 * i for i in range(len(values))]
        array = (ctypes.c_void_p * max(1, len(places)))(*places)
        if (stream, grid) not in self._configs:
            self._configs[stream, grid] = grid.config(stream)
        config = self._configs[stream, grid]
        check(name, driver.cuLaunchKernelEx(config, self._functions[name], ctypes.addressof(array), 0))


def _is_bf16(tensor: "torch.Tensor") -> bool:
    """By its type's name: this file is read where there may be no torch."""
    return str(tensor.dtype) == "torch.bfloat16"


def _bits(x: float) -> int:
    """The bits of a double as an integer."""
    return int.from_bytes(struct.pack("<d", x), "little")


def _row_blocks(rows: int) -> int:
    """A warp a row, as far as blocks go."""
    return max(1, min(MAX_BLOCKS, -(-rows * 32 // ROW_THREADS)))


def _blocks(most: int) -> int:
    """For pieces of at most so many bytes: a thread takes up to 64 of them in small ones, more in large ones."""
    return max(1, min(MAX_BLOCKS, most // (256 * 64)))


def compiled_helpers(arch: str) -> Path:
    """Path of the cubin for an architecture, as in sm_90a; compiled once."""
    from cuda.core import Program, ProgramOptions  # noqa: PLC0415 - loads NVRTC

    text = SOURCE.read_text()
    target = paths.cache_dir() / "helpers" / f"cuda-{arch}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cubin"
    if not scratch.is_whole(target):
        code = Program(text, "c++", ProgramOptions(arch=arch, std="c++17")).compile("cubin").code
        scratch.keep(target, bytes(code))
        with scratch.writing():
            scratch.seal(target)
    return target
