"""A GPU for tests: this machine's memory in place of a device's, Python functions in place of kernels.

All else is the real thing: arenas, what the worker's process does with its messages, sessions, checks, rounds.
"""

import contextlib
import ctypes
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver

from cuda_l2.contract.cuda import Plan
from cuda_l2.kernelbench.cuda_arms import CudaModelBaselines
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cuda import buffers as device_buffers
from cuda_l2.machine.cuda import windows
from cuda_l2.machine.cuda import worker_main as cuda_worker_main
from cuda_l2.machine.cuda.driver import LaunchError
from cuda_l2.machine.cuda.helpers import Projection
from cuda_l2.machine.cuda.segments import Copied, Segment
from cuda_l2.machine.cuda.worker import CudaWorker, CudaWorkers
from cuda_l2.measure import graph_rounds, product_memory, task_memory, timed_memory
from cuda_l2.measure.gpu_state import GpuSample
from cuda_l2.measure.graph_rounds import Gpu
from cuda_l2.records import Build, BuildStatus, Candidate, VerdictStatus
from cuda_l2.rigs import cuda as cuda_rig
from cuda_l2.rigs.kept import KeptBaselines
from cuda_l2.system.turns import ALONE
from cuda_l2.verify import _cuda, often
from cuda_l2.verify._cuda import Facilities

RMS_NORM = """/* cuda-l2
target = "cuda"
arch = "sm_80"
buffer = [
  {name = "x", shape = ["rows", "columns"]},
  {name = "gain", shape = ["columns"], kind = "weight"},
  {name = "out", shape = ["rows", "columns"], kind = "output"},
]
workspace = [
  {name = "kept", bytes = "4 * rows * (columns + 1)"},
  {name = "calls", bytes = 4, kind = "persistent", fill = 7},
]
[[launch]]
kernel = "rms_norm"
grid = ["rows"]
block = [128]
args = ["x", "gain", "out", "kept", "calls", "rows", "columns"]
*/
"""
"""A contract of rms_norm with a workspace of each kind, for kernels in Python."""
OK = driver.CUresult.CUDA_SUCCESS
GRAIN = 1 << 16
SMS, L2_BYTES = 132, 1 << 20
Kernel = Callable[[Mapping[str, int], Plan], None]
"""Computes a launch: addresses of tensors and workspaces by name."""


def memory(address: int, size: int) -> np.ndarray:
    """Bytes of this process."""
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8) if size else np.empty(0, np.uint8)


def floats(address: int, *shape: int) -> np.ndarray:
    return memory(address, 4 * int(np.prod(shape))).view(np.float32).reshape(shape)


class Buffer:
    """Memory of this process as a SharedBuffer."""

    def __init__(self, size: int) -> None:
        self.grain, self.fd = GRAIN, -1
        self.size = -(-max(size, 1) // GRAIN) * GRAIN
        self._all = torch.zeros(self.size + GRAIN, dtype=torch.uint8)  # behind it a GPU has nothing mapped
        self.bytes, self.address = self._all[: self.size], self._all.data_ptr()
        assert self.address % 16 == 0

    def close(self) -> None:
        pass


class Segments:
    """Fills and looks at any addresses."""

    def __init__(self, helpers: object) -> None:
        pass

    def fill(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            memory(segment.address, segment.bytes)[:] = _wanted(segment)

    def hold(self, segments: Sequence[Segment]) -> list[bool]:
        return [np.array_equal(memory(each.address, each.bytes), _wanted(each)) for each in segments]

    def look(self, segments: Sequence[Segment], copied: Copied) -> tuple[list[bool], bool]:
        memory(copied.target, copied.bytes)[:] = memory(copied.address, copied.bytes)
        return self.hold(segments), bool((memory(copied.address, copied.bytes).view(np.uint16) == copied.word).any())


def _wanted(segment: Segment) -> np.ndarray:
    if segment.source:
        return memory(segment.source, segment.bytes)
    return np.full(-(-segment.bytes // 4), segment.word, "<u4").view(np.uint8)[: segment.bytes]


class Graph:
    """What was captured runs when it is replayed."""

    def __init__(self, stream: int, enqueue: Callable[[int], None]) -> None:
        self._run = lambda: enqueue(stream)

    def once(self) -> float:
        self._run()
        return 1e-5

    def time(self, warm: int = 1, between: Callable[[], None] | None = None, before: "Graph | None" = None) -> float:
        for _ in range(warm):
            (before or self)._run()
        if between:
            between()
        self._run()
        return 1e-4

    def replay(self) -> None:
        self._run()

    def destroy(self) -> None:
        pass


class Helpers:
    def fill_segments(self, stream: int, table: Any, count: int, most: int) -> None:
        for i in range(count):
            segment = Segment(table.address[i], table.bytes[i], table.word[i], table.source[i])
            memory(segment.address, segment.bytes)[:] = _wanted(segment)

    def spoil_shared(self, *_: object) -> None: ...
    def spoil_local(self, *_: object) -> None: ...
    def spoil_behind(self, *_: object) -> None: ...
    def occupy(self, *_: object) -> None: ...
    def settle(self, *_: object) -> None: ...

    def look_at_rows(
        self, stream: int, results: Sequence[torch.Tensor], projections: Sequence[Projection], found_L4: torch.Tensor
    ) -> None:
        for c, projection, found in zip(results, projections, found_L4, strict=True):
            wide = c.float()
            noise = projection.rounding * wide.norm(dim=1) + projection.summation
            found[:2] += _summed((wide @ projection.signs_N - projection.expected_M) / noise)

    def compare_rows(
        self, stream: int, c: torch.Tensor, numbers_R: torch.Tensor, reference_RN: torch.Tensor, found: torch.Tensor
    ) -> None:
        found += _summed(c[numbers_R].float() - reference_RN)

    def slow_copy(self, stream: int, source: int, target: int, words: int, ns: int) -> None:
        memory(target, 16 * words)[:] = memory(source, 16 * words)

    def relay(self, stream: int, *, programmatic: bool) -> None:
        pass

    def empty_s(self, stream: int) -> float:
        return 1e-6

    def empty_graph(self, stream: int) -> Graph:
        return Graph(stream, lambda stream: None)


def _summed(off: torch.Tensor) -> torch.Tensor:
    return torch.stack([off.square().sum(), off.abs().max()])


class WorkerProcess(cuda_worker_main.Worker):
    """What the worker's process does, in this one."""

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self.kernels = kernels
        self.stream, self.beside, self.behind = 1, 2, 3
        self.helpers = Helpers()  # type: ignore[assignment]
        self.buffers, self.elsewhere, self.guarded, self.drawn = {}, {}, {}, {}
        self.loaded, self.bound, self.graphs = [], [], []
        self.loaded_from, self.trace, self.words = ("", ""), None, 0
        self.evicted, self.evictions, self.traffic = (0, 0), 0, (1, 1)


class Worker(CudaWorker):
    """A worker whose process is this one; messages go through JSON all the same."""

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self.process, self.arena, self.alive = WorkerProcess(kernels), None, True
        self.calls: list[str] = []

    def attach(self, arena: Any) -> None:
        self.arena = arena
        self.process.drawn = {}
        self.process.buffers = self.process.elsewhere = {  # type: ignore[assignment]
            name: SimpleNamespace(address=buffer.address, close=lambda: None) for name, buffer in arena.buffers.items()
        }

    def call(self, op: str, timeout_s: float, descriptors: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        assert timeout_s > 0
        self.calls.append(op)
        try:
            return getattr(self.process, op)(**json.loads(json.dumps(arguments))) or {}
        except LaunchError as error:
            raise Fault(VerdictStatus.FORBIDDEN, str(error)) from None


class Workers:
    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self._kernels, self.helpers, self.renewed = kernels, Helpers(), 0
        self.worker = Worker(kernels)

    @property
    def _used(self) -> dict[bool, Worker]:
        return {False: self.worker}

    detach = CudaWorkers.detach

    def get(self, arena: Any, *, traced: bool = False) -> Worker:
        self.worker.attach(arena)
        return self.worker

    def renew(self) -> None:
        self.renewed += 1
        self.worker = Worker(self._kernels)


class _Loaded:
    """A kernel found by the text of its cubin."""

    kernels: Mapping[str, Kernel]
    local_bytes = 0

    def __init__(self, cubin: bytes, plan: Plan) -> None:
        self.kernel, self.plan = self.kernels[cubin.decode()], plan

    def bind(self, pointers: Mapping[str, int]) -> Any:
        return SimpleNamespace(launch=lambda stream: self.kernel(dict(pointers), self.plan))

    def unload(self) -> None:
        pass


class Rig:
    """What a bench of a task asks of a rig. kernels: by the artifact's text."""

    turns = ALONE

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self.workers, self.tunes, self.libraries = Workers(kernels), True, None
        self.target = SimpleNamespace(sms=SMS, l2_bytes=L2_BYTES)
        self.shared = Gpu(self.workers, SMS, L2_BYTES)  # type: ignore[arg-type]
        self.models: KeptBaselines[task_memory.CudaTaskBaselines] = KeptBaselines(
            task_memory.CudaTaskBaselines(), lambda kind, task: CudaModelBaselines(task), 2
        )
        self.torch_of = self.models.of
        self.sanitized, self.finding = list[tuple[str, Any]](), ""
        self.facilities = Facilities(self.workers, SMS, self.stress_builds, 1.0, self.sanitize)  # type: ignore[arg-type]

    def free_bytes(self) -> int:
        return 8 << 30

    def rotated(self, task: object) -> int:
        return 6

    def retried(self, work: Callable[[], Any]) -> Any:
        return work()

    def steadily(self, measure: Callable[[], Any]) -> Any:
        return measure()

    def sanitize(self, tool: str, job: Any, timeout_s: float) -> str:
        self.sanitized.append((str(tool), job))
        return self.finding

    def stress_builds(self, candidate: Candidate, seeds: Sequence[int], counts: bool) -> list[Build]:
        return [Build(candidate.id, BuildStatus.FAILED, "none here")]


class _Torch:
    """torch, on the CPU where a GPU is asked for."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("randint", "randperm", "zeros"):
            return found
        return lambda *terms, **named: found(*terms, **named | {"device": "cpu"})


class Trace:
    """A trace of launches that all take 5 us."""

    def clear(self) -> None: ...
    def close(self) -> None: ...

    @classmethod
    def detach(cls) -> None: ...

    def span_s(self) -> float:
        return 5e-6


class State:
    def sample(self) -> GpuSample:
        return GpuSample(1500, 2600, 400.0, 50, ())


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, Kernel]], Rig]]:
    """fake_gpu(kernels) is a rig for benches of tasks."""
    monkeypatch.setattr(often, "LEAST", 30)  # a launch may take milliseconds here
    monkeypatch.setattr(often, "MOST", 40)
    answers = {"cuEventCreate": (OK, object()), "cuEventElapsedTime": (OK, 0.1), "cuEventRecord": (OK,)}
    answers |= dict.fromkeys(("cuEventSynchronize", "cuEventDestroy", "cuStreamSynchronize"), (OK,))
    for name, answer in answers.items():
        monkeypatch.setattr(driver, name, lambda *_, answer=answer: answer)

    def fill(width: int) -> Callable[..., tuple[Any, ...]]:
        def filled(address: int, value: int, count: int, stream: object) -> tuple[Any, ...]:
            memory(address, width * count).view(f"u{width}")[:] = value
            return (OK,)

        return filled

    def copy(target: int, source: int, size: int, stream: object) -> tuple[Any, ...]:
        memory(target, size)[:] = memory(source, size)
        return (OK,)

    for width in (1, 2, 4):
        monkeypatch.setattr(driver, f"cuMemsetD{8 * width}Async", fill(width))
    monkeypatch.setattr(driver, "cuMemcpyDtoDAsync", copy)
    room = np.zeros(4 << 20, np.uint8)
    monkeypatch.setattr(driver, "cuMemAlloc", lambda size: (OK, room.ctypes.data))
    monkeypatch.setattr(device_buffers, "SharedBuffer", Buffer)
    for module in (_cuda, timed_memory):
        monkeypatch.setattr(module, "Segments", Segments)
    monkeypatch.setattr(cuda_worker_main, "Graph", Graph)
    monkeypatch.setattr(product_memory, "Graph", Graph)
    monkeypatch.setattr(product_memory, "torch", _Torch())
    monkeypatch.setattr(cuda_worker_main, "Loaded", _Loaded)
    for module in (graph_rounds, cuda_worker_main):
        monkeypatch.setattr(module, "KernelTrace", Trace)
    monkeypatch.setattr(graph_rounds, "_state", State)
    monkeypatch.setattr(
        graph_rounds, "_heater", lambda: SimpleNamespace(run=lambda pause_s: None, pause_ended=lambda: None)
    )
    monkeypatch.setattr(task_memory, "Captured", task_memory.Calls)
    monkeypatch.setattr(cuda_rig, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_rig, "WORKSPACE_BYTES", 1 << 20)  # all of it is looked at
    monkeypatch.setattr(windows, "RECORD_BYTES", 1 << 20)
    monkeypatch.setattr(windows, "STAGED_BYTES", 1 << 18)  # several messages for the launches of some checks
    stream = SimpleNamespace(cuda_stream=7, device=torch.device("cpu"), synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def opened(kernels: Mapping[str, Kernel]) -> Rig:
        monkeypatch.setattr(_Loaded, "kernels", kernels, raising=False)
        return Rig(kernels)

    yield opened
