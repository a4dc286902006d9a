"""Device memory that two processes share: the trusted one makes and maps it, the worker maps it at its own addresses.

Around every buffer lies address space that is not mapped, so that running past an end faults.
"""

import os
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from cuda.bindings import driver

from cuda_l2.machine.cuda.driver import HANDLE_TYPE, MappedMemory, check, memory_properties


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
        there = {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3, "strides": None}
        with torch.inference_mode(False):  # may be written to in either mode later
            self.bytes = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=there), device="cuda")
            """The memory as torch's; valid while the buffer is."""

    def close(self) -> None:
        if self.fd >= 0:
            del self.bytes
            self._mapping.close()
            check("cuMemRelease", driver.cuMemRelease(self._handle))
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class Place:
    """Where something lies: a buffer's name and a byte offset into it."""

    buffer: str
    offset: int
