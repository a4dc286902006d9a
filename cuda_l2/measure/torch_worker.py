"""Torch's baselines on the CPU, in a process of their own on the memory that candidates use.

Started by `measure.torch_baselines`. Messages on standard input are JSON, one a line; an empty line means "run what was
prepared". Each is acknowledged by one byte, as candidates' runners do, so that both sides of a ratio pay the same for
the conversation. X, with a reason behind it, stands for a baseline that cannot run.
"""

import contextlib
import json
import mmap
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch

from cuda_l2 import tasks
from cuda_l2.machine.tensors import view
from cuda_l2.measure.baselines._base import Function, TorchBaseline, named
from cuda_l2.records import Tensor
from cuda_l2.system import process_tree
from cuda_l2.system.text import line_of

Views = dict[str, torch.Tensor]


class Worker:
    """The task, its baselines, and the launches that are prepared."""

    def __init__(self) -> None:
        self._mode = contextlib.ExitStack()
        self._threads = torch.get_num_threads()
        self._functions: dict[str, Function] = {}
        self._function: Function = dict
        self._calls: list[Views] = []
        self._outputs: Views = {}
        """Where the result of the last call belongs, if it returns new tensors."""
        self._results: Any = ()

    def handle(self, message: dict[str, Any]) -> bytes:
        match message["op"]:
            case "attach":
                self._attach(message)
            case "prepare":
                self._prepare(message)
            case "try":
                try:
                    self._prepare(message)
                    self.run()
                except Exception as error:  # noqa: BLE001 - a compiler fails in many ways
                    return b"X" + line_of(error).encode()
                self._collect()
            case "collect":
                self._collect()
        return b"D"

    def run(self) -> None:
        function = self._function
        for tensors in self._calls:
            self._results = function(**tensors)

    def _attach(self, message: dict[str, Any]) -> None:
        os.environ.update(message["environment"])  # Inductor reads them when it is first used
        self._task, self._functions = tasks.parse(message["task"]), {}
        self._calls, self._outputs, self._results = [], {}, ()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        self._memory = _attached(message)

    def _prepare(self, message: dict[str, Any]) -> None:
        name = message["arm"]
        baseline = named(name)
        assert isinstance(baseline, TorchBaseline)
        self._mode.close()
        self._mode.enter_context(torch.inference_mode() if baseline.in_place else torch.no_grad())
        torch.set_num_threads(baseline.threads or self._threads)
        if name not in self._functions:
            self._functions[name] = baseline.bind(self._task)
        self._function, task = self._functions[name], self._task
        given = [*task.inputs, *task.weights, *(task.outputs if baseline.in_place else ())]
        self._calls = [self._views(given, call) for call in message["calls"]]
        self._outputs = {} if baseline.in_place else self._views(task.outputs, message["calls"][-1])

    def _collect(self) -> None:
        for place, result in zip(self._outputs.values(), self._results, strict=True):
            place.copy_(result)
        self._results = ()

    def _views(self, tensors: Iterable[Tensor], offsets: dict[str, int]) -> Views:
        """Tensors of one launch at byte offsets into the shared memory."""
        found = {}
        for tensor in tensors:
            start = offsets[tensor.name]
            found[tensor.name] = view(self._memory[start : start + tensor.bytes], tensor)
        return found


def _attached(message: dict[str, Any]) -> torch.Tensor:
    """The shared memory that a message names, as bytes.

    Ends the process where it is gone: the one that asked was interrupted and awaits no answer.
    """
    try:
        descriptor = os.open(message["path"], os.O_RDWR)
    except FileNotFoundError:
        sys.exit(1)
    memory = torch.frombuffer(mmap.mmap(descriptor, message["size"]), dtype=torch.uint8)
    os.close(descriptor)
    return memory


def main() -> None:
    """Answer messages until standard input closes."""
    process_tree.end_with_parent()  # also where it is being stopped
    torch.set_num_threads(int(sys.argv[1]))
    acknowledge, worker = int(sys.argv[2]), Worker()
    os.write(acknowledge, b"R")
    for line in sys.stdin.buffer:
        if line.strip():
            os.write(acknowledge, worker.handle(json.loads(line)))
        else:
            worker.run()
            os.write(acknowledge, b"D")
