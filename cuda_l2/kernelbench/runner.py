"""The program inside the sandbox that runs a module in KernelBench's style, a ModelNew or a reference's Model.

Started by process.py in a folder with the file. A job is a line of JSON and is answered with one; a run is answered
with one byte when its launches are done and the device is idle, and another when its results lie in the shared memory.
The file's code shares this process and may change anything in it, so the judge believes its own clock and what it reads
in the shared memory, nothing else.
"""

import builtins
import contextlib
import copy
import ctypes
import importlib
import importlib.util
import json
import math
import mmap
import os
import resource
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.cpp_extension  # so that importing it changes nothing that is watched
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import profile as autograd_profile
from torch.utils._pytree import tree_leaves

from cuda_l2.kernelbench.arguments import decode, structure
from cuda_l2.system.text import line_of
from cuda_l2.tasks.warm import set_full_precision, warm_vector_math

LIBRARIES_BYTES = 8 << 30
"""Address space that torch's libraries and threads take beside what they work on."""
MAX_REASON = 300
MOST_GRAPHS = 32
COUNTERS_BYTES = 128
SHOWN, AWAITED, ARRIVED, DONE, GIVEN = 0, 1, 8, 9, 10
"""Counters of turns at the start of the shared memory: whose inputs are there, whether the judge sleeps; on another
cache line where this process waits, which launch is done, whose results are there.
"""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt's names
REPLACED_BY_COMPILER = ("Module.__init__", "Module.__setstate__", "torch.manual_seed")
"""Functions that torch.compile wraps in its own."""


def _keep_freed_memory() -> None:
    """For results of up to 32 MiB (glibc takes no more), so that no arm is slower for what was freed before.

    glibc maps large blocks anew, and the first to write pays for every page, until a larger one was freed; then it
    keeps them: a module was up to 3.6 times as fast as itself.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def main() -> None:
    """Arguments: the socket's descriptor, settings as JSON (see `process.Module`)."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    _keep_freed_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if settings["device"] == "cpu":  # CUDA reserves more address space than there is memory
        most = settings["memory_bytes"] + settings["arena_bytes"] + LIBRARIES_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        runner = Runner(connection, settings)
        answer: dict[str, Any] = {"ready": True}
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent tells the user
        answer = {"error": line_of(error)}
    connection.sendall(json.dumps(answer).encode() + b"\n")
    nowhere = os.open(os.devnull, os.O_WRONLY)  # what the file prints could fill a disk
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    for line in connection.makefile("r", encoding="utf-8"):
        job = json.loads(line)
        try:
            answer = getattr(runner, job["op"])(job)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the file's own
            answer = {"error": line_of(error)}
        if job["op"] not in ("run", "take_turns"):  # these answer as they go on
            connection.sendall(json.dumps(answer).encode() + b"\n")


Prepared = tuple[list[Any], list[Any], list[Any], str]


class Refused(Exception):
    """A result of another kind than the reference's."""


class Runner:
    """One module and the calls prepared for it. torch's own functions are taken before the file can replace them."""

    def __init__(self, connection: socket.socket, settings: dict[str, Any]) -> None:
        self._cuda = torch.cuda
        self._send, self._tensor, self._copy = connection.sendall, torch.Tensor, torch.Tensor.copy_
        self._resolved, self._parts = torch.Tensor.resolve_conj, torch.view_as_real
        self._device = torch.device(settings["device"])
        self._synchronize: Callable[[], None] = lambda: None
        torch.set_num_threads(settings["threads"])
        warm_vector_math()
        self._map = mmap.mmap(settings["arena_fd"], settings["arena_bytes"])
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._counters = memoryview(self._map)[:COUNTERS_BYTES].cast("q")
        self._let_others_run = os.sched_yield
        if self._device.type == "cuda":
            torch.zeros(1, device=self._device)  # makes the context
            set_full_precision()
            self._synchronize = torch._C._cuda_synchronize
            with contextlib.suppress(Exception):  # copies are slower without it, on every side
                runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                runtime.cudaHostRegister(self._bytes.data_ptr(), settings["arena_bytes"], 0)
        self._calls: list[
            Prepared
        ] = []  # arguments, inputs and outputs in the shared memory, the structure of the result
        self._functions: list[Callable[..., Any]] = []  # one a call
        self._class: Any = None
        self._model: Any = None
        self._compile = False
        self._copies: list[tuple[Any, Callable[..., Any]]] = []  # of the module, with what calls each
        self._static: list[list[Any]] = []  # arguments of calls that stay where they are
        self._warm: set[int] = set()  # calls that ran once
        self._graphs: dict[tuple[int, ...], Callable[[], Any]] = {}
        self._sequence: tuple[int, ...] | None = None  # what a run launches; None for every call once
        self._once: Callable[[], Any] = lambda: None
        self._watched = {owner: dict(vars(owner)) for owner in _watched()}

    def load(self, job: dict[str, Any]) -> dict[str, Any]:
        """Execute a file and find its class."""
        spec = importlib.util.spec_from_file_location(Path(job["file"]).stem, Path(job["file"]).resolve())
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(module)
        self._class = getattr(module, job["class"], None)
        if not isinstance(self._class, type):
            raise ValueError(f"the file has no class {job['class']}")
        return {}

    def make(self, job: dict[str, Any]) -> dict[str, Any]:
        """A new instance under a seed, as KernelBench makes it; the names in its state."""
        initial = decode(job["initial"])
        torch.manual_seed(job["seed"])
        with torch.no_grad():
            model = self._class(**initial) if isinstance(initial, dict) else self._class(*initial)
            self._model = model.to(self._device) if isinstance(model, torch.nn.Module) else model
        if job["compile"]:
            torch.compiler.reset()
        self._compile = job["compile"]
        self._copies = [(self._model, self._called(self._model))]
        self._calls, self._static, self._warm, self._graphs = [], [], set(), {}
        return {"state": sorted(self._state(self._model))}

    def prepare(self, job: dict[str, Any]) -> dict[str, Any]:
        """Take calls: where their inputs and results lie; put weights in place where names agree.

        A call with weights of its own has a copy of the module of its own, made once. static: on a GPU the inputs of
        call i lie where those of call i lay before.
        """
        on_cpu = self._device.type == "cpu"
        self._calls, self._functions, self._sequence = [], [], None
        for call in job["calls"]:
            arena = [None if "number" in given else self._view(given) for given in call["inputs"]]
            arguments = [
                given["number"] if view is None else view.to(self._device)
                for given, view in zip(call["inputs"], arena, strict=True)
            ]
            if job["static"] and not on_cpu:
                arguments = self._kept(len(self._calls), arguments)
            self._calls.append((arguments, arena, [self._view(place) for place in call["outputs"]], call["result"]))
            model, function = self._copy_of(len(self._functions) if call["weights"] else 0)
            self._functions.append(function)
            self._set(model, call["weights"])
        self._set(self._model, job["weights"])
        self._synchronize()
        return {}

    def _kept(self, index: int, arguments: list[Any]) -> list[Any]:
        if index == len(self._static):
            self._static.append(arguments)
        for kept, new in zip(self._static[index], arguments, strict=True):
            if isinstance(new, self._tensor) and kept is not new:
                self._copy(kept, new)
        return self._static[index]

    def play(self, job: dict[str, Any]) -> dict[str, Any]:
        """Have runs launch prepared calls in this order and give the last one's results alone.

        graph: as a CUDA graph, captured where the order is new. What is compiled on first use is so here.
        """
        sequence = tuple(job["sequence"])
        for index in sorted(set(sequence) - self._warm):
            self._in_turn((index,))
        self._warm.update(sequence)
        self._once = self._captured(sequence) if job["graph"] else partial(self._in_turn, sequence)
        self._sequence = sequence
        self._synchronize()
        return {}

    def _in_turn(self, sequence: tuple[int, ...]) -> Any:
        """The last result; the memory of each serves the next."""
        result = None
        with torch.no_grad():
            for index in sequence:
                result = None
                result = self._functions[index](*self._calls[index][0])
        return result

    def _captured(self, sequence: tuple[int, ...]) -> Callable[[], Any]:
        """A function that replays a CUDA graph of these calls and gives the last result."""
        if sequence not in self._graphs:
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.clear()
            cuda = self._cuda
            graph, stream = cuda.CUDAGraph(), cuda.Stream()
            stream.wait_stream(cuda.current_stream())
            with cuda.stream(stream):
                self._in_turn(tuple(sorted(set(sequence))))  # what a library sets up for a stream is not captured
            self._synchronize()
            with cuda.graph(graph, stream=stream):
                result = self._in_turn(sequence)

            def replay() -> Any:
                graph.replay()
                return result

            self._graphs[sequence] = replay
        return self._graphs[sequence]

    def _called(self, model: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = torch.compile(model, dynamic=False) if self._compile else model
        return function

    def _copy_of(self, index: int) -> tuple[Any, Callable[..., Any]]:
        while len(self._copies) <= index:
            model = copy.deepcopy(self._model)
            self._copies.append((model, self._called(model)))
        return self._copies[index]

    def _set(self, model: Any, weights: dict[str, Any]) -> None:
        state = self._state(model) if weights else {}
        with torch.no_grad():
            for key, place in weights.items():
                value = self._view(place)
                if key in state and state[key].shape == value.shape and state[key].dtype == value.dtype:
                    state[key].copy_(value)

    def run(self, job: dict[str, Any]) -> None:
        """Every call, then their results where the judge finds them: D and C, or X and a line.

        repeats: how often in a row, where an order of calls is played.
        """
        try:
            results = self._launch(job["repeats"])
            self._synchronize()
            self._send(b"D")
            self._collect(results, self._given_calls())
            self._send(b"C")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the file's own
            self._send_failure(error)

    def take_turns(self, job: dict[str, Any]) -> None:
        """Calls in this order, each once its inputs are shown, its results where the judge finds them before it goes
        on; at last C, or X and a line. empty: call nothing and give nothing, for what the rest takes.
        """
        try:
            with torch.no_grad():
                for number, index in enumerate(job["order"], 1):
                    function, call = self._functions[index], self._calls[index]
                    self._tell(ARRIVED, number)
                    while self._counters[SHOWN] < number:
                        self._let_others_run()
                    if job["empty"]:
                        self._tell(DONE, number)
                    else:
                        result = function(*call[0])
                        self._synchronize()
                        self._tell(DONE, number)
                        self._collect([result], [call])
                        result = None  # every call finds the same memory free
                    self._tell(GIVEN, number)
            self._send(b"C")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the file's own
            self._send_failure(error)

    def _tell(self, counter: int, number: int) -> None:
        self._counters[counter] = number
        if self._counters[AWAITED]:
            self._send(b"T")

    def _send_failure(self, error: BaseException) -> None:
        kind = "refused" if isinstance(error, Refused) else "error"
        text = str(error) if kind == "refused" else line_of(error)
        self._send(b"X" + json.dumps({kind: text}).encode() + b"\n")

    def give_inputs_back(self, _: dict[str, Any]) -> dict[str, Any]:
        """Put what the inputs are now where they came from."""
        for arguments, arena, _outputs, _result in self._calls:
            for value, view in zip(arguments, arena, strict=True):
                if view is not None and value is not view:
                    self._copy(view, value)
        self._synchronize()
        return {}

    def profile(self, _: dict[str, Any]) -> dict[str, Any]:
        """Run the calls under PyTorch's profiler: microseconds in all, of PyTorch's outermost operators on the CPU and
        the device, of kernels, from every thread; and whether torch.compile has made any.
        """
        device = "cuda" if self._device.type == "cuda" else None
        config = _ExperimentalConfig(profile_all_threads=True)
        # what torch.profiler does, but that it loads torch.compile, 1.5 s of a core, for one of its settings
        with autograd_profile(use_device=device, use_kineto=True, experimental_config=config) as profile:
            start = time.perf_counter()
            results = self._launch()
            self._synchronize()
            seconds = time.perf_counter() - start
        self._collect(results, self._given_calls())
        outer: dict[str, list[float]] = {}
        kernels: dict[str, float] = {}
        for event in profile.function_events or ():
            if event.device_type == DeviceType.CUDA:  # in some versions a new object each time
                name = event.name[:MAX_REASON]
                kernels[name] = kernels.get(name, 0.0) + event.time_range.elapsed_us()
            elif event.name.startswith("aten::") and not _within_operator(event):
                total = outer.setdefault(event.name.removeprefix("aten::"), [0.0, 0.0])
                total[0] += event.cpu_time_total
                total[1] += event.device_time_total
        return {"us": seconds * 1e6, "operators": outer, "kernels": kernels, "compiled": _compiled()}

    def replaced(self, _: dict[str, Any]) -> dict[str, Any]:
        """Functions of torch and Python that are not what they were before the file was loaded."""
        found = []
        for owner, before in self._watched.items():
            now = vars(owner)
            for name, old in before.items():
                if callable(old) and now.get(name) is not old:
                    found.append(f"{getattr(owner, '__name__', owner)}.{name}")
        if _compiled():
            found = [name for name in found if name not in REPLACED_BY_COMPILER]
        return {"replaced": sorted(found)[:20]}

    def _launch(self, repeats: int = 1) -> list[Any]:
        if self._sequence is not None:
            result = None
            for _ in range(repeats):
                result = None
                result = self._once()
            return [result] * len(self._sequence[-1:])
        with torch.no_grad():
            return [function(*call[0]) for function, call in zip(self._functions, self._calls, strict=True)]

    def _given_calls(self) -> list[Prepared]:
        """Those whose results a launch gives."""
        return self._calls if self._sequence is None else [self._calls[index] for index in self._sequence[-1:]]

    def _collect(self, results: list[Any], calls: list[Prepared]) -> None:
        for result, (_, _, places, expected) in zip(results, calls, strict=True):
            found = structure(result, self._tensor)
            if found != expected:
                raise Refused(f"gives {found}, not {expected}")
            for leaf, place in zip(tree_leaves(result), places, strict=True):
                plain = type(leaf) is self._tensor and leaf.layout is torch.strided
                if plain and leaf.dtype.is_complex:
                    leaf = self._parts(self._resolved(leaf))
                self._require_plain(leaf, place)
                self._copy(place, leaf)
        self._synchronize()

    def _require_plain(self, value: Any, place: Any) -> None:
        """Refused where a result is anything else than a tensor that is there."""
        if type(value) is not self._tensor:
            raise Refused(f"gives a {type(value).__name__}, not a torch.Tensor")
        if value.layout is not torch.strided or value.device.type != self._device.type:
            raise Refused(f"gives a {value.layout} tensor on {value.device}")
        if value.shape != place.shape or value.dtype is not place.dtype:
            raise Refused(f"gives {value.dtype}{list(value.shape)}, not {place.dtype}{list(place.shape)}")

    def _state(self, model: Any) -> dict[str, Any]:
        if not isinstance(model, torch.nn.Module):
            return {}
        return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}

    def _view(self, place: dict[str, Any]) -> Any:
        dtype, start = getattr(torch, place["dtype"]), place["offset"]
        size = math.prod(place["shape"]) * dtype.itemsize
        return self._bytes[start : start + size].view(dtype).view(place["shape"])


def _within_operator(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith("aten::"):
        parent = parent.cpu_parent
    return parent is not None


def _compiled() -> bool:
    """Whether torch.compile has made kernels for anything."""
    utilities = sys.modules.get("torch._dynamo.utils")
    return bool(utilities and utilities.counters["stats"]["unique_graphs"])


def _watched() -> Iterator[Any]:
    """Modules and classes whose functions published candidates have replaced, and those like them."""
    yield from (builtins, time, os, json, sys, socket.socket, mmap)
    yield from (torch, torch.Tensor, torch._C, torch.nn.Module, torch.nn.functional, torch.testing, torch.linalg)
    yield from (torch.cuda, torch.cuda.Event, torch.cuda.Stream, torch.autograd, torch.autograd.Function)
    yield from (torch.profiler, torch.Tensor.__mro__[1], torch.utils.cpp_extension, torch.random)
    yield from (value for value in vars(torch.nn).values() if isinstance(value, type))
