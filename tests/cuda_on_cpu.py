"""Runs candidates of the GPU families of tasks on the CPU, through their contracts' plans: cuda_on_cpu.h says how."""

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cuda_l2 import contract
from cuda_l2.contract.cuda import Argument, Plan
from cuda_l2.records import Build, BuildStatus, Candidate, Operation, Task
from cuda_l2.rigs.cuda import CudaBench
from cuda_l2.system import paths

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
GUARD_BYTES = 512
GUARD = 0xA5


class Compiled:
    """One candidate as a shared library. The cache keeps it; what is loaded is a copy with variables of its own."""

    def __init__(self, source: str, folder: Path) -> None:
        self.contract = contract.parse_cuda(source)
        kept = paths.cache_dir() / "on-cpu"
        kept.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(b"\0".join([source.encode(), HEADER.read_bytes(), _compiler()])).hexdigest()[:16]
        library = kept / f"{digest}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=kept) as work:
                self._compile(source, Path(work) / "candidate.cpp").replace(library)
        self._library = ctypes.CDLL(str(shutil.copy(library, folder)))

    def _compile(self, source: str, text: Path) -> Path:
        code = "\n".join(line for line in contract.code(source).splitlines() if not line.startswith("#include <cuda_"))
        kernels = "".join(f"KERNEL({name})\n" for name in self.contract.kernels)
        defines, rest = _defines(code)
        text.write_text(f'{defines}#include "{HEADER}"\n{rest}\n{kernels}')
        library = text.with_suffix(".so")
        command = ["g++", "-std=c++20", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-w", "-shared", "-fPIC"]
        command += ["-U_FORTIFY_SOURCE"]  # which takes a jump to another stack for an error
        done = subprocess.run([*command, "-pthread", str(text), "-o", str(library)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
        return library

    def launch(self, plan: Plan, addresses: Mapping[str, int]) -> None:
        """A plan's launches on tensors and workspaces at these addresses."""
        for launch in plan.launches:
            arguments = [_argument(argument, addresses) for argument in launch.arguments]
            pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
            sizes = (ctypes.c_uint * 6)(*launch.grid, *launch.block)
            blocks = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
            run = getattr(self._library, f"run_{launch.kernel}")
            run(sizes, ctypes.c_uint(blocks), ctypes.c_size_t(launch.shared_bytes), pointers)

    def run(self, task: Operation, tensors: Mapping[str, torch.Tensor], sms: int) -> dict[str, torch.Tensor]:
        """The outputs; AssertionError where something beside outputs and workspaces was written."""
        plan = self.contract.plan(task, sms)
        memory = {name: _guarded(tensor.contiguous()) for name, tensor in tensors.items()}
        for tensor in task.outputs:
            memory[tensor.name] = _guarded(torch.full(tensor.shape, 77, dtype=getattr(torch, tensor.dtype)))
        for workspace in plan.workspaces:
            words = torch.full((-(-workspace.bytes // 4),), workspace.fill if workspace.persistent else 0x7FC12345)
            memory[workspace.name] = _guarded(words.int())
        before = {name: block.clone() for name, block in memory.items()}
        self.launch(plan, {name: block.data_ptr() + GUARD_BYTES for name, block in memory.items()})
        kept = {workspace.name for workspace in plan.workspaces if workspace.persistent}
        changing = {tensor.name for tensor in task.outputs} | {workspace.name for workspace in plan.workspaces}
        for name, block in memory.items():
            if name in changing - kept:
                edges = (slice(0, GUARD_BYTES), slice(block.numel() - GUARD_BYTES, None))
                assert all(bool((block[edge] == GUARD).all()) for edge in edges), f"writes around {name}"
            else:
                assert torch.equal(block, before[name]), f"changes {name}"
        return {
            tensor.name: memory[tensor.name][GUARD_BYTES:-GUARD_BYTES]
            .view(getattr(torch, tensor.dtype))
            .reshape(tensor.shape)
            for tensor in task.outputs
        }


def bench_of(fake_gpu: Any, source: str, task: Task, folder: Path) -> tuple[CudaBench, Candidate, Build]:
    """A source compiled for this CPU, and a bench that launches it on the stand-in of tests/fake_gpu.py."""
    compiled, candidate, artifact = Compiled(source, folder), Candidate(source), folder / "cubin"
    artifact.write_text("kernel")
    rig = fake_gpu({"kernel": lambda addresses, plan: compiled.launch(plan, addresses)})
    return CudaBench(rig, task, 1), candidate, Build(candidate.id, BuildStatus.BUILT, artifact=str(artifact))


@cache
def _compiler() -> bytes:
    """Which compiler it is, for which processor."""
    return subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout + platform.machine().encode()


def _defines(code: str) -> tuple[str, str]:
    """The macros that a schedule sets, and what follows: the header needs to know the type."""
    lines = code.lstrip().splitlines(keepends=True)
    count = next(i for i, line in enumerate(lines) if not line.startswith("#define"))
    return "".join(lines[:count]), "".join(lines[count:])


def _guarded(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes between guards, aligned to 16."""
    data = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    guard = torch.full((GUARD_BYTES,), GUARD, dtype=torch.uint8)
    block = torch.cat([guard, data, guard])
    assert block.data_ptr() % 16 == 0
    return block


def _argument(argument: Argument, addresses: Mapping[str, int]) -> ctypes.Array[ctypes.c_char]:
    """The argument's bytes."""
    if argument.kind == "pointer":
        data = addresses[argument.name].to_bytes(8, "little")
    else:
        data = bytes.fromhex(argument.data)
    return ctypes.create_string_buffer(data, len(data))
