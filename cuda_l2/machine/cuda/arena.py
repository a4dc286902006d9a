"""Device memory for one matrix product: operands in windows, output, records, workspaces."""

import math
from typing import Any

import torch

from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda.device_arena import (
    GUARD_BYTES,
    MAX_RECORDS,
    RECORD_BYTES,
    WINDOW_ALIGN,
    WINDOWS,
    DeviceArena,
    Place,
)
from cuda_l2.machine.cuda.segments import Segment
from cuda_l2.machine.fills import POISON
from cuda_l2.records import Gemm, Layout

OTHER_B = "b_other"
"""The buffer that holds B in the layout that is not the task's."""


class CudaArena(DeviceArena):
    """Shared device memory for one Gemm. A context manager; views die with it.

    Matrices are placed either snug, ending where their mapping ends, so that one step too far faults; or aligned as
    torch's allocator would, for timing. Timed launches alternate between windows, so that each changes the output:
    versions of A a few rows apart in one buffer, which costs the cache nothing; or, with rotate, so many separate A, B
    and C that together they exceed the cache. With both_layouts kernels can have B in the other layout too.
    """

    def __init__(self, gemm: Gemm, workspace_bytes: int, *, rotate: int = 0, both_layouts: bool = False) -> None:
        self.gemm, self.windows = gemm, rotate or WINDOWS
        row_bytes = 2 * gemm.k
        self._bytes = {"a": row_bytes * gemm.m, "b": 2 * gemm.k * gemm.n, "c": 2 * gemm.m * gemm.n}
        if rotate:
            self._shift = {name: -(-size // WINDOW_ALIGN) * WINDOW_ALIGN for name, size in self._bytes.items()}
        else:  # the fewest rows that keep every window aligned
            self._shift = {"a": row_bytes * (WINDOW_ALIGN // math.gcd(row_bytes, WINDOW_ALIGN)), "b": 0, "c": 0}
        if both_layouts:
            self._bytes[OTHER_B], self._shift[OTHER_B] = self._bytes["b"], self._shift["b"]
        self._spans = {name: size + (self.windows - 1) * self._shift[name] for name, size in self._bytes.items()}
        self.record_stride = self._bytes["c"]
        self.records = max(2, min(MAX_RECORDS, RECORD_BYTES // self.record_stride))
        sizes = {name: size + 2 * GUARD_BYTES for name, size in self._spans.items()}
        sizes["staging"] = self._bytes["a"]  # where a producer of A has it from
        sizes["record"] = self.records * self.record_stride
        super().__init__(sizes, workspace_bytes)
        self.place(snug=False)

    def place(self, *, snug: bool) -> None:
        """Choose where the matrices lie, and set the guards around them."""
        used = self._bytes if snug else self._spans
        self._offsets = self.surround(used, snug=snug)

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

    def written(self, window: int = 0) -> list[Any]:
        """C of a window as the worker poisons and records it: buffer, offset, bytes, the word, where in a record."""
        place = self.operands(window)["c"]
        return [place.buffer, place.offset, self._bytes["c"], POISON << 16 | POISON, 0]

    def operands(self, window: int = 0, *, other_layout: bool = False) -> dict[str, Place]:
        """Where A, B and C lie."""
        buffers = {"a": "a", "b": OTHER_B if other_layout else "b", "c": "c"}
        return {
            name: Place(buffer, self._offsets[buffer] + window * self._shift[buffer])
            for name, buffer in buffers.items()
        }

    def places(self, plan: Plan, window: int = 0, *, slot: int = 0, other_layout: bool = False) -> dict[str, Place]:
        """Where a plan's pointers lie; lays out its workspaces."""
        return {**self.operands(window, other_layout=other_layout), **self.lay_out(plan, slot)}

    @property
    def window_words(self) -> dict[str, int]:
        """fp16 words from one window of a, b or c to the next."""
        return {name: shift // 2 for name, shift in self._shift.items()}

    def poison_outputs(self) -> None:
        self.span("c").view(torch.int16).fill_(POISON)

    def before_launch(self, plan: Plan, *, scratch: bool) -> list[Segment]:
        """What memory beside the operands is to hold before a launch: poison in C, scratch, guards."""
        poison = Segment(self.c().data_ptr(), self._bytes["c"], POISON << 16 | POISON)
        return [poison, *(self.scratch(plan) if scratch else ())]

    def _view(self, name: str, window: int, shape: tuple[int, int]) -> torch.Tensor:
        return self.buffers[name].tensor(self._offsets[name] + window * self._shift[name], shape, torch.float16)
