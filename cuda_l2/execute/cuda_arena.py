"""Device memory shared with a candidate's process: operands, output and workspaces, each alone in its address range.

The trusted process creates the memory and maps it; the worker maps the same memory under its own addresses. Around
every buffer lies address space that is not mapped, so that running past an end faults; inside the mapping the space
before and behind a matrix is a guard band that is compared.
"""

import math
import os
from dataclasses import dataclass

import torch
from cuda.bindings import driver

from cuda_l2.contract.cuda import Plan
from cuda_l2.execute.cuda_driver import HANDLE_TYPE, MappedMemory, check, memory_properties
from cuda_l2.records import Gemm, Layout

GUARD_BYTES = 4096
GUARD_BYTE = 0xA5
POISON = 0x7DAD
"""An fp16 NaN no kernel has reason to write: what an output holds before a launch."""
WINDOWS = 4
"""Versions of A that timed launches alternate between, so that every launch changes the output."""
WORKSPACE_ALIGN = 1024
TENSOR_ALIGN = 16
"""What the contract promises of a pointer."""
WINDOW_ALIGN = 256


class SharedBuffer:
    """Device memory that another process can map through a file descriptor."""

    def __init__(self, size: int) -> None:
        location = memory_properties()
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        grain = check("cuMemGetAllocationGranularity", driver.cuMemGetAllocationGranularity(location, recommended))
        self.size = -(-max(size, 1) // grain) * grain
        self._handle = check("cuMemCreate", driver.cuMemCreate(self.size, location, 0))
        self.fd = int(
            check("cuMemExportToShareableHandle", driver.cuMemExportToShareableHandle(self._handle, HANDLE_TYPE, 0))
        )
        self.grain = int(grain)
        self._mapping = MappedMemory(self._handle, self.size, grain)
        self.address = self._mapping.address

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous view; valid while the buffer is."""
        return torch.as_tensor(_View(self.address + offset, shape, dtype), device="cuda")

    def close(self) -> None:
        if self.fd >= 0:
            self._mapping.close()
            check("cuMemRelease", driver.cuMemRelease(self._handle))
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Where something lies: a buffer's name and a byte offset into it."""

    buffer: str
    offset: int


class CudaArena:
    """Shared device memory for one Gemm. A context manager; views die with it.

    Matrices are placed either snug, ending where their mapping ends, so that one step too far faults; or aligned as
    torch's allocator would, for timing, with WINDOWS versions of A that lie a few rows apart in one buffer.
    """

    def __init__(self, gemm: Gemm, workspace_bytes: int) -> None:
        self.gemm, self.workspace_bytes = gemm, workspace_bytes
        row_bytes = 2 * gemm.k
        self.window_rows = WINDOW_ALIGN // math.gcd(row_bytes, WINDOW_ALIGN)
        """Rows between two windows: the fewest that keep every window aligned."""
        self.rows = gemm.m + (WINDOWS - 1) * self.window_rows
        self._bytes = {"a": row_bytes * self.rows, "b": 2 * gemm.k * gemm.n, "c": 2 * gemm.m * gemm.n}
        sizes = {name: size + 2 * GUARD_BYTES for name, size in self._bytes.items()}
        sizes["workspace"] = workspace_bytes + 32 * GUARD_BYTES
        self.buffers: dict[str, SharedBuffer] = {}
        try:
            for name, size in sizes.items():
                self.buffers[name] = SharedBuffer(size)
        except BaseException:
            self.close()
            raise
        self._workspaces: dict[str, tuple[int, int]] = {}
        self.place(snug=False)

    def place(self, *, snug: bool) -> None:
        """Choose where the matrices lie, and set the guards around them."""
        gemm = self.gemm
        used = dict(self._bytes)
        if snug:
            used["a"] = 2 * gemm.m * gemm.k
        self.offsets = {
            name: (self.buffers[name].size - size) // TENSOR_ALIGN * TENSOR_ALIGN if snug else GUARD_BYTES
            for name, size in used.items()
        }
        self._guards = {}
        for name, size in used.items():
            whole = self.buffers[name].tensor(0, (self.buffers[name].size,), torch.uint8)
            offset = self.offsets[name]
            before, behind = whole[max(0, offset - GUARD_BYTES) : offset], whole[offset + size :][:GUARD_BYTES]
            self._guards[name] = (before, behind)
            before.fill_(GUARD_BYTE)
            behind.fill_(GUARD_BYTE)
        half = torch.float16
        self.a_all = self._view("a", (gemm.m if snug else self.rows, gemm.k), half)
        """A with the rows of every window."""
        self.b = self._view("b", (gemm.k, gemm.n) if gemm.layout is Layout.NN else (gemm.n, gemm.k), half)
        self.c = self._view("c", (gemm.m, gemm.n), half)
        self.snug = snug

    def a(self, window: int = 0) -> torch.Tensor:
        """A of one window, M x K."""
        first = window * self.window_rows
        return self.a_all[first : first + self.gemm.m]

    def places(self, plan: Plan, window: int = 0) -> dict[str, Place]:
        """Where a plan's pointers lie; lays out its workspaces."""
        shift = 2 * self.gemm.k * self.window_rows * window
        found = {name: Place(name, self.offsets[name]) for name in ("a", "b", "c")}
        found["a"] = Place("a", self.offsets["a"] + shift)
        self._workspaces = {}
        end = GUARD_BYTES
        for workspace in plan.workspaces:
            found[workspace.name] = Place("workspace", end)
            self._workspaces[workspace.name] = (end, workspace.bytes)
            end += -(-workspace.bytes // WORKSPACE_ALIGN) * WORKSPACE_ALIGN + GUARD_BYTES
        return found

    def poison_output(self) -> None:
        self.c.view(torch.int16).fill_(POISON)

    def fill_workspaces(self, plan: Plan, *, persistent: bool) -> None:
        """Garbage into scratch workspaces and guards behind all; persistent ones get their fill where asked."""
        if not plan.workspaces:
            return
        buffer = self.buffers["workspace"]
        for workspace in plan.workspaces:
            start, size = self._workspaces[workspace.name]
            words = buffer.tensor(start, (-(-size // 4),), torch.int32)
            if not workspace.persistent:
                words.fill_(-1 - 0x04040404)  # bytes 0xFB: as floats and as counters, nothing useful
            elif persistent:
                words.fill_(workspace.fill - (1 << 32) if workspace.fill >> 31 else workspace.fill)
            buffer.tensor(start + 4 * words.numel(), (GUARD_BYTES // 2,), torch.uint8).fill_(GUARD_BYTE)

    def damage(self, plan: Plan) -> str:
        """What a launch changed that it must not, in a few words; empty where it kept its bounds."""
        intact = [(band == GUARD_BYTE).all() for bands in self._guards.values() for band in bands if band.numel()]
        buffer, restored = self.buffers["workspace"], []
        for workspace in plan.workspaces:
            start, size = self._workspaces[workspace.name]
            words = -(-size // 4)
            intact.append((buffer.tensor(start + 4 * words, (GUARD_BYTES // 2,), torch.uint8) == GUARD_BYTE).all())
            if workspace.persistent:
                fill = workspace.fill - (1 << 32) if workspace.fill >> 31 else workspace.fill
                restored.append((buffer.tensor(start, (words,), torch.int32) == fill).all())
        good = torch.stack([torch.stack(intact).all(), torch.stack(restored).all() if restored else intact[0]]).tolist()
        if not good[0]:
            return "wrote outside C and its workspaces"
        if restored and not good[1]:
            return "left a persistent workspace other than it found it"
        return ""

    def close(self) -> None:
        for buffer in self.buffers.values():
            buffer.close()
        self.buffers = {}

    def __enter__(self) -> "CudaArena":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.buffers[name].tensor(self.offsets[name], shape, dtype)


class _View:
    """Raw device memory as torch reads it in."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        kind = {torch.float16: "<f2", torch.uint8: "|u1", torch.int32: "<i4", torch.float32: "<f4"}[dtype]
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": kind,
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
