"""PyTorch on one of our own tasks, eager and compiled, in a process of its own on the memory that candidates use.

Started by `measure.task_baselines`, addressed as measure/torch_worker.py is. Results are new tensors, as PyTorch makes
them; the last one of a run is copied into its output when that is asked for.
"""

import struct
import sys
from collections.abc import Callable
from typing import Any

import torch

from cuda_l2 import tasks
from cuda_l2.measure.torch_worker import attached, serve
from cuda_l2.records import Operation, Tensor
from cuda_l2.system.text import line_of
from cuda_l2.tasks._base import Tensors, definition

EAGER, COMPILED = "torch eager", "torch.compile"

Arm = Callable[..., tuple[torch.Tensor, ...]]


class TaskArms:
    """What the arms of a task work on."""

    def __init__(self) -> None:
        self.arms: dict[str, Arm] = {}
        self.prepared: list[Tensors] = []
        self.results: tuple[torch.Tensor, ...] = ()

    def handle(self, message: dict[str, Any]) -> bytes:
        match message["op"]:
            case "attach":
                self._attach(message)
            case "prepare":
                self.launch = self.arms[message["arm"]]
                self.prepared = [self._views(self.given, call) for call in message["calls"]]
                self.written = self._views(self.task.outputs, message["last"])
            case "try":
                try:
                    self.results = self.arms[message["arm"]](**self._views(self.given, message["given"]))
                except Exception as error:  # noqa: BLE001 - a compiler fails in many ways
                    reason = line_of(error).encode()
                    return b"X" + struct.pack("i", len(reason)) + reason
                self._collect(self._views(self.task.outputs, message["outputs"]))
            case "collect":
                self._collect(self.written)
        return b"D"

    def run(self) -> None:
        for tensors in self.prepared:
            self.results = self.launch(**tensors)

    def _attach(self, message: dict[str, Any]) -> None:
        task = tasks.parse(message["task"])
        assert isinstance(task, Operation)
        self.task, self.given, self.memory = task, (*task.inputs, *task.weights), attached(message)
        function = definition(task.name).bind(dict(task.sizes))
        torch.compiler.reset()
        self.arms = {EAGER: function, COMPILED: torch.compile(function, dynamic=False)}

    def _collect(self, outputs: Tensors) -> None:
        for place, result in zip(outputs.values(), self.results, strict=True):
            place.copy_(result)
        self.results = ()

    def _views(self, tensors: tuple[Tensor, ...], offsets: list[int]) -> Tensors:
        return {
            tensor.name: self.memory[offset : offset + tensor.bytes]
            .view(getattr(torch, tensor.dtype))
            .reshape(tensor.shape)
            for tensor, offset in zip(tensors, offsets, strict=True)
        }


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    arms = TaskArms()
    with torch.no_grad():
        serve(int(sys.argv[2]), arms.handle, arms.run)


if __name__ == "__main__":
    main()
