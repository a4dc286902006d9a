"""Device memory shared with a candidate's process: each buffer alone in its address range, guards, workspaces.

The trusted process creates the memory and maps it; the worker maps the same memory under its own addresses. Around
every buffer lies address space that is not mapped, so that running past an end faults; inside the mapping the space
before and behind what a candidate is given is a guard band that is compared.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from cuda.bindings import driver

from cuda_l2.contract import ContractError
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda.driver import HANDLE_TYPE, MappedMemory, check, memory_properties
from cuda_l2.machine.cuda.segments import Segment
from cuda_l2.machine.fills import GUARD_BYTE, SCRATCH_BYTE

GUARD_BYTES = 4096
GUARD_WORD, SCRATCH_WORD = 0x01010101 * GUARD_BYTE, 0x01010101 * SCRATCH_BYTE
OUTSIDE = "wrote outside its outputs and workspaces"
NOT_RESTORED = "left a persistent workspace other than it found it"
WINDOWS = 4
"""Versions of inputs that timed launches alternate between, so that every launch changes the output."""
WORKSPACE_ALIGN = 1024
TENSOR_ALIGN = 16
"""What the contract promises of a pointer."""
WINDOW_ALIGN = 256
RECORD_BYTES = 64 << 20
MAX_RECORDS = 256
WORKSPACE_SLACK = 32 * GUARD_BYTES
"""For guards and alignment beside the workspaces themselves."""


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


class DeviceArena:
    """Buffers by name, and the workspaces of plans in the one called `workspace`. A context manager; views die with it.

    sizes: bytes of the others.
    """

    records: int
    """The outputs of so many launches can be kept for a look at each."""
    record_stride: int
    """Bytes from what one record holds to the next."""

    def __init__(self, sizes: Mapping[str, int], workspace_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes
        self.buffers: dict[str, SharedBuffer] = {}
        try:
            for name, size in {**sizes, "workspace": workspace_bytes + WORKSPACE_SLACK}.items():
                self.buffers[name] = SharedBuffer(size)
        except BaseException:
            self.close()
            raise
        self._guards: list[torch.Tensor] = []
        """Bands of bytes around what candidates are given."""
        self._workspaces: list[dict[str, tuple[int, int]]] = []
        """Of every kernel: offset and bytes by name."""

    def lay_out(self, plan: Plan, slot: int = 0) -> dict[str, Place]:
        """Where a plan's workspaces lie: behind those of the kernels in the slots before it.

        Later slots' are forgotten. ContractError where they are too many.
        """
        found: dict[str, Place] = {}
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

    def surround(self, used: Mapping[str, int], *, snug: bool) -> dict[str, int]:
        """Where so many bytes of each buffer lie, guard bands set around them.

        snug: they end where their mapping ends, so that one step too far faults; else aligned as torch's allocator
        would.
        """
        offsets: dict[str, int] = {}
        self._guards = []
        for name, size in used.items():
            whole = self.buffers[name].tensor(0, (self.buffers[name].size,), torch.uint8)
            offset = (len(whole) - size) // TENSOR_ALIGN * TENSOR_ALIGN if snug else GUARD_BYTES
            self._guards += [whole[max(0, offset - GUARD_BYTES) : offset], whole[offset + size :][:GUARD_BYTES]]
            offsets[name] = offset
        for band in self._guards:
            band.fill_(GUARD_BYTE)
        return offsets

    def stage(self, tensor: torch.Tensor) -> None:
        """Put a tensor into the staging buffer, where a slow producer has it from; guard bytes behind it."""
        words = tensor.contiguous().flatten().view(torch.uint8)
        self.buffers["staging"].tensor(0, (words.numel(),), torch.uint8).copy_(words)
        behind = -words.numel() % TENSOR_ALIGN
        if behind:
            self.buffers["staging"].tensor(words.numel(), (behind,), torch.uint8).fill_(GUARD_BYTE)

    def address(self, place: Place) -> int:
        """A place's address in this process."""
        return self.buffers[place.buffer].address + place.offset

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

    def scratch(self, plan: Plan) -> list[Segment]:
        """What workspaces are to hold before a launch, the persistent ones apart: garbage, and guards behind all."""
        garbage = [self._workspace_segment(w.name, SCRATCH_WORD) for w in plan.workspaces if not w.persistent]
        return garbage + [self._guard_behind(workspace.name) for workspace in plan.workspaces]

    def after_launch(self, plan: Plan) -> tuple[list[Segment], list[Segment]]:
        """What memory must hold after it: guards, and persistent workspaces as they were filled."""
        guards = [Segment(band.data_ptr(), band.numel(), GUARD_WORD) for band in self._guards if band.numel()]
        guards += [self._guard_behind(workspace.name) for workspace in plan.workspaces]
        return guards, [self._workspace_segment(w.name, w.fill) for w in plan.workspaces if w.persistent]

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _workspace_segment(self, name: str, word: int) -> Segment:
        start, size = self._workspaces[0][name]
        return Segment(self.buffers["workspace"].address + start, -(-size // 4) * 4, word)

    def _guard_behind(self, name: str) -> Segment:
        start, size = self._workspaces[0][name]
        return Segment(self.buffers["workspace"].address + start + -(-size // 4) * 4, GUARD_BYTES // 2, GUARD_WORD)


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
