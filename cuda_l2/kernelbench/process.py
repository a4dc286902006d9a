"""A module in KernelBench's style in a sandboxed process of its own, addressed through memory that we share with it."""

import contextlib
import fcntl
import json
import math
import mmap
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cuda_l2.kernelbench import runner
from cuda_l2.kernelbench.conversation import Conversation, one_line
from cuda_l2.kernelbench.opened import Call
from cuda_l2.kernelbench.sandboxed import GONE, SandboxedPython
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu.worker import STOP_TIMEOUT_S
from cuda_l2.machine.fills import POISONS
from cuda_l2.records import DTYPE_BYTES, Tensor, VerdictStatus
from cuda_l2.system import process_tree, sandbox
from cuda_l2.system.closing import Closing
from cuda_l2.tasks._base import Tensors

LINE = 64
LOAD_TIMEOUT_S = 600.0
MOST_RUNNING_BYTES = 64 << 10
"""Inputs and results of a call up to this are moved while its process waits for them: that takes microseconds."""
RUNNER_BYTES = 1 << 30
"""Memory of a process with torch loaded, beside what its module takes."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a run by our clock: until its launches were done, and until their results were read."""

    run_s: float
    collect_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Microseconds of a run as the module's own process reports them: of the GPU where it worked, else of the CPU.

    operators: PyTorch's outermost ones, without `aten::`. kernels: of the GPU. compiled: by torch.compile, in part.
    """

    total_us: float
    operators: dict[str, float]
    kernels: dict[str, float]
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Resources:
    """Limits of a module's process. device: cpu or cuda. spins: threads do so between parallel regions, each on a
    core of its own; else they sleep.
    """

    device: str
    threads: int
    memory_bytes: int
    arena_bytes: int
    timeout_s: float
    spins: bool = False


class Module(Closing):
    """One file's class in a process. A context manager; Fault where the process or the module fails."""

    def __init__(self, source: bytes, class_name: str, resources: Resources, *, compiled: bool = False) -> None:
        self._class, self._resources, self._compiled = class_name, resources, compiled
        self._fd = os.memfd_create("cuda-l2-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, resources.arena_bytes)
        # a file made shorter would end us as we read it
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self._fd, resources.arena_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        on_gpu = resources.device != "cpu"
        settings = {
            "arena_fd": self._fd,
            "arena_bytes": resources.arena_bytes,
            "memory_bytes": resources.memory_bytes,
            "device": resources.device,
            "threads": resources.threads,
        }
        try:
            self._process = SandboxedPython(
                runner.__name__,
                {"module.py": source},
                memory_bytes=resources.memory_bytes + resources.arena_bytes + RUNNER_BYTES,
                arguments=[json.dumps(settings)],
                pass_fds=[self._fd],
                devices=sandbox.gpu_devices() if on_gpu else (),
                spins=resources.spins,
            )
        except BaseException:
            os.close(self._fd)
            raise
        counters = memoryview(self._map)[: runner.COUNTERS_BYTES].cast("q")
        self._talk = Conversation(self._process, counters, resources.timeout_s)
        self.own_processes = len(process_tree.processes(self._process.pid))
        self._calls: list[Call] = []
        self._places: list[dict[str, int]] = []
        self._given: dict[int, Tensors] = {}  # results of calls that took turns
        self._stopped: list[int] = []
        self.state: set[str] = set()

    @property
    def on_cpu(self) -> bool:
        return self._resources.device == "cpu"

    @property
    def pid(self) -> int:
        """Process id of the sandbox's first process."""
        return self._process.pid

    @property
    def folder(self) -> Path:
        return self._process.folder

    def load(self, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Execute the file, which compiles its own code then; Fault with the reason where that fails."""
        answer = self._talk.ask({"op": "load", "file": "module.py", "class": self._class}, timeout_s)
        if "error" in answer:
            raise Fault(VerdictStatus.CRASHED, one_line(answer["error"]))

    def make(self, seed: int, initial: Any) -> None:
        """A new instance whose weights come from a seed."""
        self.thaw()
        message = {"op": "make", "seed": seed, "initial": initial, "compile": self._compiled}
        answer = self._talk.require(message, "its module cannot be made")
        state = answer.get("state")
        self.state = {name for name in state if isinstance(name, str)} if isinstance(state, list) else set()

    def prepare(
        self, calls: Sequence[Call], weights: Mapping[str, torch.Tensor], *, static: bool = False, turns: bool = False
    ) -> None:
        """Put inputs, weights by their keys, and poison for outputs into the shared memory; the process is stopped.

        On the CPU inputs come when it is stopped already: nothing can work on them before the clock runs. static: a
        GPU has the inputs of each call where it had those of the same call before, so that its graphs stay right.
        turns: for `take_turns`, which writes inputs itself on a CPU.
        """
        end = runner.COUNTERS_BYTES

        def place(dtype: str, shape: Sequence[int]) -> dict[str, Any]:
            nonlocal end
            start, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
            end = (end + LINE - 1) // LINE * LINE
            if end > self._resources.arena_bytes:
                raise ValueError("the calls take more memory than is shared")
            return {"offset": start, "dtype": dtype, "shape": list(shape)}

        def put(weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
            placed = {}
            for key, value in weights.items():
                placed[key] = place(str(value.dtype).removeprefix("torch."), value.shape)
                self._view(Tensor("w", placed[key]["dtype"], tuple(value.shape)), placed[key]["offset"]).copy_(value)
            return placed

        self._calls, self._places, self._given = list(calls), [], {}
        placed_calls: list[dict[str, Any]] = []
        for call in calls:
            inputs = [
                {"number": call.numbers[t.name]} if t.name in call.numbers else place(t.dtype, t.shape)
                for t in call.task.inputs
            ]
            outputs = [place(t.dtype, t.shape) for t in call.task.outputs]
            for tensor, given in zip(call.task.outputs, outputs, strict=True):
                self._poison(tensor, given["offset"])
            named = zip((*call.task.inputs, *call.task.outputs), (*inputs, *outputs), strict=True)
            self._places.append({t.name: int(given["offset"]) for t, given in named if "offset" in given})
            placed_calls.append(
                {"inputs": inputs, "outputs": outputs, "result": call.result, "weights": put(call.weights)}
            )
        placed = put(weights)
        if not self.on_cpu:
            self._write_inputs()
        self.thaw()
        message = {"op": "prepare", "calls": placed_calls, "weights": placed, "static": static}
        self._talk.require(message, "its weights cannot be set")
        self.freeze()
        if self.on_cpu and not turns:
            self._write_inputs()

    def _write_inputs(self) -> None:
        for index in range(len(self._calls)):
            _copy(self._inputs(index))

    def _inputs(self, index: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Inputs of a call as bytes: the place and the values of each.

        NumPy copies them on one thread: PyTorch's own threads would go on to spin beside the process that is timed.
        """
        call, places = self._calls[index], self._places[index]
        real = [tensor for tensor in call.task.inputs if tensor.name in places]
        pairs = [(self._view(tensor, places[tensor.name]), call.tensors[tensor.name]) for tensor in real]
        return [(_raw(place).numpy(), _raw(values).numpy()) for place, values in pairs]

    def play(self, sequence: Sequence[int], *, graph: bool) -> None:
        """Have runs launch prepared calls in this order, and give the last one's results alone; the process is stopped.

        graph: as a CUDA graph of them. Each call has run once, and what it compiles is compiled.
        """
        for index in sequence[-1:]:
            for tensor in self._calls[index].task.outputs:
                self._poison(tensor, self._places[index][tensor.name])
        self.thaw()
        message = {"op": "play", "sequence": list(sequence), "graph": graph}
        self._talk.require(message, "its forward cannot be captured" if graph else "its forward fails")
        self.freeze()

    def run(self, repeats: int = 1) -> Spent:
        """Launch what was prepared; afterwards every process of it is stopped, and results are as they are then.

        repeats: how often in a row, where an order of calls is played.
        """
        self._given = {}
        self._talk.send({"op": "run", "repeats": repeats})
        start = time.perf_counter()  # before any of its threads runs on
        self.thaw()
        done, collected = self._talk.await_run()
        self.freeze()
        return Spent(done - start, collected - done)

    def take_turns(
        self,
        order: Sequence[int] | None = None,
        *,
        empty: bool = False,
        leading: int = 0,
        before: Callable[[], None] = lambda: None,
    ) -> Spent:
        """Launch prepared calls in turns: a call begins when the results of the one before have been read.

        Afterwards every process is stopped. On a CPU a call's inputs are written in its turn, so that no calls can be
        computed together; on a GPU they lie there from `prepare` on. The clock of a call runs from before its inputs
        are there. They are written while the process waits where that takes microseconds, else while it is stopped.

        order: numbers of calls, else each once. empty: nothing is called and there are no results: the time that the
        turns themselves take. leading: number of turns at the start that do not count: a process that goes on after a
        stop is slow at first. before: done before each call that counts.
        """
        order = range(len(self._calls)) if order is None else order
        sizes = [sum(t.bytes for t in (*call.task.inputs, *call.task.outputs)) for call in self._calls]
        running = [not self.on_cpu or size <= MOST_RUNNING_BYTES for size in sizes]
        inputs = {index: self._inputs(index) if self.on_cpu else [] for index in order}
        self._talk.begin_turns()
        self._talk.send({"op": "take_turns", "order": list(order), "empty": empty})
        self.thaw()
        run_s = collect_s = 0.0
        for turn, index in enumerate(order, 1):
            self._talk.await_turn(runner.ARRIVED, turn)
            if turn > leading:
                before()
            if not running[index]:
                self.freeze()
                _copy(inputs[index])
            start = time.perf_counter()
            if running[index]:
                _copy(inputs[index])
            self._talk.show(turn)
            if not running[index]:
                self.thaw()
            self._talk.await_turn(runner.DONE, turn)
            done = time.perf_counter()
            self._talk.await_turn(runner.GIVEN, turn)
            if turn > leading:
                collect_s += time.perf_counter() - done
                run_s += done - start
            if not empty:
                self._given[index] = self._result(index)
        self._talk.end_turns()
        self.freeze()
        return Spent(run_s, collect_s)

    def output(self, index: int = 0) -> Tensors:
        """Results of one of the calls, copied."""
        return self._given[index] if index in self._given else self._result(index)

    def _result(self, index: int) -> Tensors:
        places = self._places[index]
        outputs = {tensor: self._view(tensor, places[tensor.name]) for tensor in self._calls[index].task.outputs}
        copies = {tensor: torch.from_numpy(_raw(view).numpy().copy()) for tensor, view in outputs.items()}
        return {t.name: raw.view(outputs[t].dtype).view(t.shape) for t, raw in copies.items()}

    def require_untouched(self) -> None:
        """Fault where a call changed its inputs, of those that took turns where any did. A stopped process on the CPU
        stays so.
        """
        if not self.on_cpu:
            self.thaw()
            self._talk.require({"op": "give_inputs_back"}, "its inputs cannot be read")
        for index in self._given or range(len(self._calls)):
            call, places = self._calls[index], self._places[index]
            for tensor in call.task.inputs:
                if tensor.name in places:
                    found = self._view(tensor, places[tensor.name])
                    if not torch.equal(_raw(found), _raw(call.tensors[tensor.name])):
                        raise Fault(VerdictStatus.UNHYGIENIC, f"changed its input {tensor.name}")

    def profile(self) -> Profile:
        """Launch what was prepared under PyTorch's profiler; what the process says of that.

        On a GPU the profiler brings CUPTI into the process, where it stays and may take time at every launch: nothing
        may be timed there afterwards.
        """
        self.thaw()
        answer = self._talk.require({"op": "profile"}, "its forward fails under the profiler")
        self.freeze()
        try:
            kernels = {one_line(name): float(us) for name, us in answer["kernels"].items()}
            column = 1 if kernels else 0
            operators = {one_line(name): float(us[column]) for name, us in answer["operators"].items()}
            return Profile(sum(kernels.values()) or float(answer["us"]), operators, kernels, bool(answer["compiled"]))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise Fault(VerdictStatus.CRASHED, GONE) from None

    def replaced(self) -> list[str]:
        """Functions that its file replaced, self-reported."""
        self.thaw()
        names = self._talk.ask({"op": "replaced"}).get("replaced", [])
        return [one_line(name) for name in names] if isinstance(names, list) else []

    def processes(self) -> int:
        return len(process_tree.processes(self._process.pid))

    def cpu_seconds(self) -> float:
        return process_tree.cpu_seconds(self._process.pid)

    def queued_s(self) -> float:
        """Seconds that its threads have waited for a core."""
        return process_tree.queued_s(self._process.pid)

    def pin(self, cores: Collection[int]) -> None:
        """Keep the first thread of each of its processes on these cores; others run where they like."""
        for pid in process_tree.processes(self._process.pid):
            with contextlib.suppress(OSError):  # gone, or not ours to move
                os.sched_setaffinity(pid, cores)

    def freeze(self) -> None:
        self._stopped = process_tree.stop(self._process.pid)

    def await_stopped(self) -> None:
        """Return when every thread of a process that is being stopped has stopped; Fault where one does not."""
        for pid in self._stopped:
            with contextlib.suppress(OSError):  # gone
                if not process_tree.wait_stopped(pid, STOP_TIMEOUT_S):
                    raise Fault(VerdictStatus.FORBIDDEN, "does not stop")

    def thaw(self) -> None:
        """Let every process go on that was stopped: none began since, and they need not be looked for."""
        process_tree.resume(self._stopped)
        self._stopped = []

    def close(self) -> None:
        self._process.close()
        os.close(self._fd)

    def _view(self, tensor: Tensor, offset: int) -> torch.Tensor:
        raw = self._bytes[offset : offset + tensor.bytes]
        return raw.view(getattr(torch, tensor.dtype)).view(tensor.shape)

    def _poison(self, tensor: Tensor, offset: int) -> None:
        poison = POISONS[tensor.dtype]
        word = np.dtype(f"u{len(poison)}")  # byte by byte takes longer
        self._bytes[offset : offset + tensor.bytes].numpy().view(word)[:] = np.frombuffer(poison, word)


def _copy(inputs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    for place, values in inputs:
        place[:] = values


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
