"""The CPU baselines, run by torch in a process of their own on the same shared memory as candidates.

Started by `measure.baselines`. Messages on standard input are a 4-byte length and JSON; length 0 means
"run what was prepared". Each is acknowledged by one byte, as candidates' runners do, so that both sides of a
ratio pay the same for the conversation.
"""

import json
import mmap
import os
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def half(gemm: dict[str, Any]) -> Launch:
    """torch.matmul as it stands, fp16 in and out."""
    return lambda a, b, c: torch.matmul(a, b, out=c)


def widened(gemm: dict[str, Any]) -> Launch:
    """torch.matmul on operands widened to fp32, one expression, conversions counted."""
    return lambda a, b, c: c.copy_(torch.matmul(a.float(), b.float()))


def preallocated(gemm: dict[str, Any]) -> Launch:
    """The same with the widened buffers allocated beforehand."""
    m, n, k = gemm["m"], gemm["n"], gemm["k"]
    a32, b32, c32 = torch.empty(m, k), torch.empty(k, n), torch.empty(m, n)
    if gemm["layout"] == "tn":
        b32 = torch.empty(n, k).t()

    def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        a32.copy_(a)
        b32.copy_(b)
        torch.mm(a32, b32, out=c32)
        c.copy_(c32)

    return launch


ARMS: dict[str, Callable[[dict[str, Any]], Launch]] = {
    "torch fp16": half,
    "torch widened": widened,
    "torch widened, preallocated": preallocated,
}


class GemmArms:
    """What the arms of a matrix product work on."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.float16)
        self.gemm: dict[str, Any] = {}
        self.launches: dict[str, Launch] = {}
        self.launch: Launch = half({})
        self.prepared: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def handle(self, message: dict[str, Any]) -> bytes:
        if message["op"] == "attach":
            self.gemm, self.launches = message, {}
            self.memory = attached(message).view(torch.float16)
        else:
            name = message["arm"]
            if name not in self.launches:
                self.launches[name] = ARMS[name](self.gemm)
            self.launch = self.launches[name]
            self.prepared = [_views(self.memory, self.gemm, call) for call in message["calls"]]
        return b"D"

    def run(self) -> None:
        for a, b, c in self.prepared:
            self.launch(a, b, c)


def serve(acknowledge: int, handle: Callable[[dict[str, Any]], bytes], run: Callable[[], None]) -> None:
    """Answer messages until standard input closes; torch needs no gradients here."""
    os.write(acknowledge, b"R")
    while True:
        header = _read(4)
        if not header:
            return
        (length,) = struct.unpack("i", header)
        if length:
            os.write(acknowledge, handle(json.loads(_read(length))))
        else:
            run()
            os.write(acknowledge, b"D")


def attached(message: dict[str, Any]) -> torch.Tensor:
    """The shared memory that a message names, as bytes."""
    descriptor = os.open(message["path"], os.O_RDWR)
    memory = torch.frombuffer(mmap.mmap(descriptor, message["size"]), dtype=torch.uint8)
    os.close(descriptor)
    return memory


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    arms = GemmArms()
    with torch.inference_mode():
        serve(int(sys.argv[2]), arms.handle, arms.run)


def _views(
    memory: torch.Tensor, gemm: dict[str, Any], offsets: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, B and C of one launch at byte offsets into the arena."""
    m, n, k = gemm["m"], gemm["n"], gemm["k"]
    a, b, c = (offset // 2 for offset in offsets)
    b_strides = (n, 1) if gemm["layout"] == "nn" else (1, k)
    return (
        memory.as_strided((m, k), (k, 1), a),
        memory.as_strided((k, n), b_strides, b),
        memory.as_strided((m, n), (n, 1), c),
    )


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            return b""
        data += part
    return data


if __name__ == "__main__":
    main()
