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

from cuda_l2.contract import ContractError
from cuda_l2.contract.cuda import Plan
from cuda_l2.execute.cuda_driver import HANDLE_TYPE, MappedMemory, check, memory_properties
from cuda_l2.execute.fills import GUARD_BYTE, POISON, SCRATCH_BYTE
from cuda_l2.execute.segments import Segment
from cuda_l2.records import Gemm, Layout

GUARD_BYTES = 4096
GUARD_WORD, SCRATCH_WORD = 0x01010101 * GUARD_BYTE, 0x01010101 * SCRATCH_BYTE
OUTSIDE = "wrote outside C and its workspaces"
NOT_RESTORED = "left a persistent workspace other than it found it"
WINDOWS = 4
"""Versions of A that timed launches alternate between, so that every launch changes the output."""
WORKSPACE_ALIGN = 1024
TENSOR_ALIGN = 16
"""What the contract promises of a pointer."""
WINDOW_ALIGN = 256
OTHER_B = "b_other"
"""The buffer that holds B in the layout that is not the task's."""
RECORD_BYTES = 64 << 20
MAX_RECORDS = 256


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
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous view; valid while the buffer is. Kept: making one takes longer than a small launch."""
        key = (offset, shape, dtype)
        if key not in self._views:
            with torch.inference_mode(False):  # may be written to in either mode later
                self._views[key] = torch.as_tensor(_View(self.address + offset, shape, dtype), device="cuda")
        return self._views[key]

    def close(self) -> None:
        if self.fd >= 0:
            self._views = {}
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
    torch's allocator would, for timing. Timed launches alternate between windows, so that each changes the output:
    versions of A a few rows apart in one buffer, which costs the cache nothing; or, with rotate, so many separate A, B
    and C that together they exceed the cache. With both_layouts kernels can have B in the other layout too.
    """

    def __init__(self, gemm: Gemm, workspace_bytes: int, *, rotate: int = 0, both_layouts: bool = False) -> None:
        self.gemm, self.workspace_bytes, self.windows = gemm, workspace_bytes, rotate or WINDOWS
        row_bytes = 2 * gemm.k
        self._bytes = {"a": row_bytes * gemm.m, "b": 2 * gemm.k * gemm.n, "c": 2 * gemm.m * gemm.n}
        if rotate:
            self._shift = {name: -(-size // WINDOW_ALIGN) * WINDOW_ALIGN for name, size in self._bytes.items()}
        else:  # the fewest rows that keep every window aligned
            self._shift = {"a": row_bytes * (WINDOW_ALIGN // math.gcd(row_bytes, WINDOW_ALIGN)), "b": 0, "c": 0}
        if both_layouts:
            self._bytes[OTHER_B], self._shift[OTHER_B] = self._bytes["b"], self._shift["b"]
        self._spans = {name: size + (self.windows - 1) * self._shift[name] for name, size in self._bytes.items()}
        self.records = max(2, min(MAX_RECORDS, RECORD_BYTES // self._bytes["c"]))
        """Outputs of so many launches can be kept for a look at each."""
        sizes = {name: size + 2 * GUARD_BYTES for name, size in self._spans.items()}
        sizes["staging"] = self._bytes["a"]  # where a producer of A has it from
        sizes["record"] = self.records * self._bytes["c"]
        sizes["workspace"] = workspace_bytes + 32 * GUARD_BYTES
        self.buffers: dict[str, SharedBuffer] = {}
        try:
            for name, size in sizes.items():
                self.buffers[name] = SharedBuffer(size)
        except BaseException:
            self.close()
            raise
        self._workspaces: list[dict[str, tuple[int, int]]] = []
        """Of every kernel: offset and bytes by name."""
        self.place(snug=False)

    def place(self, *, snug: bool) -> None:
        """Choose where the matrices lie, and set the guards around them."""
        used = self._bytes if snug else self._spans
        self._offsets = {
            name: (self.buffers[name].size - size) // TENSOR_ALIGN * TENSOR_ALIGN if snug else GUARD_BYTES
            for name, size in used.items()
        }
        self._guards = []
        for name, size in used.items():
            whole = self.buffers[name].tensor(0, (self.buffers[name].size,), torch.uint8)
            offset = self._offsets[name]
            self._guards += [whole[max(0, offset - GUARD_BYTES) : offset], whole[offset + size :][:GUARD_BYTES]]
        for band in self._guards:
            band.fill_(GUARD_BYTE)

    def a(self, window: int = 0) -> torch.Tensor:
        """A of one window, M x K."""
        return self._view("a", window, (self.gemm.m, self.gemm.k))

    def b(self, window: int = 0) -> torch.Tensor:
        """B of one window as the task lays it out."""
        gemm = self.gemm
        return self._view("b", window, (gemm.k, gemm.n) if gemm.layout is Layout.NN else (gemm.n, gemm.k))

    def other_b(self, window: int = 0) -> torch.Tensor:
        """B of one window in the other layout, where the arena has it."""
        gemm = self.gemm
        return self._view(OTHER_B, window, (gemm.n, gemm.k) if gemm.layout is Layout.NN else (gemm.k, gemm.n))

    def c(self, window: int = 0) -> torch.Tensor:
        """C of one window, M x N; the same memory for all unless they rotate."""
        return self._view("c", window, (self.gemm.m, self.gemm.n))

    def span(self, name: str) -> torch.Tensor:
        """All of a, b or c, every window of it, as fp16 words."""
        return self.buffers[name].tensor(self._offsets[name], (self._spans[name] // 2,), torch.float16)

    def recorded(self, count: int) -> torch.Tensor:
        """Outputs that the last recorded launches gave, count x M x N."""
        return self.buffers["record"].tensor(0, (count, self.gemm.m, self.gemm.n), torch.float16)

    def operands(self, window: int = 0, *, other_layout: bool = False) -> dict[str, Place]:
        """Where A, B and C lie."""
        buffers = {"a": "a", "b": OTHER_B if other_layout else "b", "c": "c"}
        return {
            name: Place(buffer, self._offsets[buffer] + window * self._shift[buffer])
            for name, buffer in buffers.items()
        }

    def places(self, plan: Plan, window: int = 0, *, slot: int = 0, other_layout: bool = False) -> dict[str, Place]:
        """Where a plan's pointers lie; lays out its workspaces, behind those of the kernels in the slots before it.

        Later slots' are forgotten.
        """
        found = self.operands(window, other_layout=other_layout)
        own: dict[str, tuple[int, int]] = {}
        self._workspaces = [*self._workspaces[:slot], own]
        before = [place for kernel in self._workspaces for place in kernel.values()]
        end = max((_behind(*place) for place in before), default=GUARD_BYTES)
        for workspace in plan.workspaces:
            found[workspace.name] = Place("workspace", end)
            own[workspace.name] = (end, workspace.bytes)
            end = _behind(*own[workspace.name])
        if end + GUARD_BYTES > self.buffers["workspace"].size:
            raise ContractError("the workspaces, with the guards around them, are more than a candidate may have")
        return found

    def address(self, place: Place) -> int:
        """A place's address in this process."""
        return self.buffers[place.buffer].address + place.offset

    @property
    def window_words(self) -> dict[str, int]:
        """fp16 words from one window of a, b or c to the next."""
        return {name: shift // 2 for name, shift in self._shift.items()}

    def stage(self, a: torch.Tensor) -> None:
        """Put an A (fp16, M x K) into the staging buffer, guard bytes behind it."""
        words = a.contiguous().view(torch.uint8).flatten()
        self.buffers["staging"].tensor(0, (words.numel(),), torch.uint8).copy_(words)
        behind = -words.numel() % TENSOR_ALIGN
        if behind:
            self.buffers["staging"].tensor(words.numel(), (behind,), torch.uint8).fill_(GUARD_BYTE)

    def poison_outputs(self) -> None:
        self.span("c").view(torch.int16).fill_(POISON)

    def fill_workspaces(self, plan: Plan, *, persistent: bool, slot: int = 0) -> None:
        """Garbage into scratch workspaces and guards behind all; persistent ones get their fill where asked."""
        if not plan.workspaces:
            return
        buffer = self.buffers["workspace"]
        for workspace in plan.workspaces:
            start, size = self._workspaces[slot][workspace.name]
            words = buffer.tensor(start, (-(-size // 4),), torch.int32)
            if not workspace.persistent:
                words.view(torch.uint8).fill_(SCRATCH_BYTE)
            elif persistent:
                words.fill_(workspace.fill - (1 << 32) if workspace.fill >> 31 else workspace.fill)
            buffer.tensor(start + 4 * words.numel(), (GUARD_BYTES // 2,), torch.uint8).fill_(GUARD_BYTE)

    def before_launch(self, plan: Plan, *, scratch: bool) -> list[Segment]:
        """What memory beside the operands is to hold before a launch: poison in C, scratch, guards."""
        segments = [Segment(self.c().data_ptr(), self._bytes["c"], POISON << 16 | POISON)]
        for workspace in plan.workspaces:
            if scratch and not workspace.persistent:
                segments.append(self._workspace_segment(workspace.name, SCRATCH_WORD))
        return segments + [self._guard_behind(workspace.name) for workspace in plan.workspaces if scratch]

    def after_launch(self, plan: Plan) -> tuple[list[Segment], list[Segment]]:
        """What memory must hold after it: guards, and persistent workspaces as they were filled."""
        guards = [Segment(band.data_ptr(), band.numel(), GUARD_WORD) for band in self._guards if band.numel()]
        guards += [self._guard_behind(workspace.name) for workspace in plan.workspaces]
        return guards, [self._workspace_segment(w.name, w.fill) for w in plan.workspaces if w.persistent]

    def _workspace_segment(self, name: str, word: int) -> Segment:
        start, size = self._workspaces[0][name]
        return Segment(self.buffers["workspace"].address + start, -(-size // 4) * 4, word)

    def _guard_behind(self, name: str) -> Segment:
        start, size = self._workspaces[0][name]
        return Segment(self.buffers["workspace"].address + start + -(-size // 4) * 4, GUARD_BYTES // 2, GUARD_WORD)

    def damage(self, plan: Plan, slot: int = 0) -> str:
        """What a launch changed that it must not, in a few words; empty where it kept its bounds."""
        bands = list(self._guards)
        buffer, restored = self.buffers["workspace"], []
        for workspace in plan.workspaces:
            start, size = self._workspaces[slot][workspace.name]
            words = -(-size // 4)
            bands.append(buffer.tensor(start + 4 * words, (GUARD_BYTES // 2,), torch.uint8))
            if workspace.persistent:
                fill = workspace.fill - (1 << 32) if workspace.fill >> 31 else workspace.fill
                restored.append((buffer.tensor(start, (words,), torch.int32) == fill).all())
        intact, *found = torch.stack([(torch.cat(bands) == GUARD_BYTE).all(), *restored]).tolist()
        if not intact:
            return OUTSIDE
        if not all(found):
            return NOT_RESTORED
        return ""

    def close(self) -> None:
        for buffer in self.buffers.values():
            buffer.close()
        self.buffers = {}

    def __enter__(self) -> "CudaArena":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _view(self, name: str, window: int, shape: tuple[int, int]) -> torch.Tensor:
        return self.buffers[name].tensor(self._offsets[name] + window * self._shift[name], shape, torch.float16)


def _behind(start: int, size: int) -> int:
    """Where what follows a workspace and its guard begins."""
    return start + -(-size // WORKSPACE_ALIGN) * WORKSPACE_ALIGN + GUARD_BYTES


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
