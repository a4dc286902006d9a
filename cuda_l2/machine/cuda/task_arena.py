"""Device memory for one task other than a matrix product: its tensors by name, in windows, and workspaces.

The same memory is laid out anew for other sizes of the task.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cpu.task_arena import raw
from cuda_l2.machine.cuda.device_arena import (
    GUARD_BYTES,
    MAX_RECORDS,
    RECORD_BYTES,
    TENSOR_ALIGN,
    WINDOW_ALIGN,
    DeviceArena,
    Place,
)
from cuda_l2.machine.cuda.segments import Segment
from cuda_l2.machine.fills import GUARD_BYTE, POISON_WORDS
from cuda_l2.records import Operation, Tensor
from cuda_l2.system import scratch

Tensors = Mapping[str, torch.Tensor]


class CudaTaskArena(DeviceArena):
    """Shared device memory for an Operation, at its own sizes and at others. A context manager; views die with it.

    Timed launches alternate between windows, each with inputs and weights of its own, at the first task's sizes; the
    others have one. Outputs are the same memory for all of them, so that each launch changes what the last one wrote,
    unless they rotate: then every window has its own.
    """

    def __init__(
        self, tasks: Sequence[Operation], workspace_bytes: int, *, windows: int = 1, rotates: bool = False
    ) -> None:
        self._tasks, self._most_windows, self._rotates = tasks, windows, rotates
        spans = [self._spans_of(task) for task in tasks]
        sizes = {buffer: max(each[buffer] for each in spans) + 2 * GUARD_BYTES for buffer in spans[0]}
        sizes["staging"] = max(tensor.bytes for task in tasks for tensor in _given(task)) + TENSOR_ALIGN
        strides = [_record_stride(task) for task in tasks]
        sizes["record"] = max(stride * _records(stride) for stride in strides)
        super().__init__(sizes, workspace_bytes)
        self.select(tasks[0])

    def _spans_of(self, task: Operation) -> dict[str, int]:
        """Bytes of each tensor's buffer that hold its windows; sets what the layout depends on."""
        self.task, self.windows = task, self._most_windows if task == self._tasks[0] else 1
        self._shift = {tensor.name: _up(tensor.bytes + TENSOR_ALIGN, WINDOW_ALIGN) for tensor in _given(task)}
        self._shift |= {tensor.name: self._shift_of_output(tensor) for tensor in task.outputs}
        return {
            buffer_name(tensor): tensor.bytes + (self.windows - 1) * self._shift[tensor.name] for tensor in _all(task)
        }

    def _shift_of_output(self, output: Tensor) -> int:
        return _up(output.bytes + TENSOR_ALIGN, WINDOW_ALIGN) if self._rotates else 0

    def select(self, task: Operation, *, snug: bool = False) -> None:
        """Lay the memory out for this task, one of those given; what it held before is of no meaning.

        snug: the first window's tensors end where their mapping ends.
        """
        spans = self._spans_of(task)
        bytes_of = {buffer_name(tensor): tensor.bytes for tensor in _all(task)}
        offsets = self.surround(bytes_of if snug else spans, snug=snug)
        self.snug = snug
        self._offsets = {tensor.name: offsets[buffer_name(tensor)] for tensor in _all(task)}
        self.record_stride, self.records = _record_stride(task), _records(_record_stride(task))
        for tensor in () if snug else _all(task):
            for window in range(self.windows - 1 if self._shift[tensor.name] else 0):
                start = self._offset(tensor.name, window) + tensor.bytes
                behind = self._whole(tensor)[start : self._offset(tensor.name, window + 1)]
                behind.fill_(GUARD_BYTE)
                self._guards.append(behind)

    def tensor(self, tensor: Tensor, window: int = 0) -> torch.Tensor:
        """A view of a tensor in a window."""
        dtype = getattr(torch, tensor.dtype)
        if not tensor.elements:
            return torch.empty(tensor.shape, dtype=dtype, device=self._whole(tensor).device)
        return self._bytes(tensor, window).view(dtype).reshape(tensor.shape)

    def output(self, output: Tensor, window: int = 0) -> torch.Tensor:
        """A view of an output; as uint8 where it should be bool and holds something else."""
        return _checked(output, self.tensor(output, window))

    def given(self, window: int = 0) -> dict[str, torch.Tensor]:
        """Inputs and weights of a window."""
        return {tensor.name: self.tensor(tensor, window) for tensor in _given(self.task)}

    def recorded(self, number: int) -> dict[str, torch.Tensor]:
        """Outputs of the so-manieth launch that was recorded last."""
        found, start = {}, number * self.record_stride
        for output in self.task.outputs:
            words = self.buffers["record"].tensor(start, (output.bytes,), torch.uint8) if output.elements else None
            view = self.tensor(output) if words is None else words.view(getattr(torch, output.dtype))
            found[output.name] = _checked(output, view.reshape(output.shape))
            start += _up(output.bytes, TENSOR_ALIGN)
        return found

    def written(self, window: int = 0) -> list[list[Any]]:
        """Outputs of a window as the worker poisons and records them.

        Buffer, offset, bytes, the word that poisons it, where it lies in a record.
        """
        found, at = [], 0
        for output in self.task.outputs:
            place = self._place(output, window)
            found.append([place.buffer, place.offset, output.bytes, POISON_WORDS[output.dtype], at])
            at += _up(output.bytes, TENSOR_ALIGN)
        return found

    def places(self, plan: Plan, window: int = 0, *, slot: int = 0) -> dict[str, Place]:
        """Where a plan's pointers lie; lays out its workspaces."""
        found = {tensor.name: self._place(tensor, window) for tensor in _all(self.task)}
        return found | self.lay_out(plan, slot)

    def before_launch(self, tensors: Tensors, prefill: Tensors | None = None) -> list[Segment]:
        """What the first window is to hold before a launch: inputs, weights, and outputs poisoned or as given."""
        segments = self.held(tensors)
        for output in self.task.outputs:
            source = prefill[output.name].data_ptr() if prefill else 0
            segments.append(Segment(self._address(output), output.bytes, POISON_WORDS[output.dtype], source))
        return [segment for segment in segments if segment.bytes]

    def held(self, tensors: Tensors, window: int = 0) -> list[Segment]:
        """What a window's inputs and weights are to hold, before a launch and after it.

        The tensors must be contiguous, and stay.
        """
        return [
            Segment(self._address(tensor, window), tensor.bytes, source=tensors[tensor.name].data_ptr())
            for tensor in _given(self.task)
            if tensor.bytes
        ]

    def forget_records(self) -> None:
        """Leave no output there: NaN where there is one."""
        record = self.buffers["record"]
        record.tensor(0, (record.size,), torch.uint8).fill_(0xFF)

    def poisons(self) -> list[Segment]:
        """What outputs of every window are to hold before a round."""
        return [
            Segment(self._address(output, window), output.bytes, POISON_WORDS[output.dtype])
            for window in range(self.windows if self._rotates else 1)
            for output in self.task.outputs
            if output.bytes
        ]

    def _address(self, tensor: Tensor, window: int = 0) -> int:
        return self.address(self._place(tensor, window))

    def _place(self, tensor: Tensor, window: int) -> Place:
        return Place(buffer_name(tensor), self._offset(tensor.name, window))

    def _offset(self, name: str, window: int) -> int:
        return self._offsets[name] + window * self._shift[name]

    def _whole(self, tensor: Tensor) -> torch.Tensor:
        buffer = self.buffers[buffer_name(tensor)]
        return buffer.tensor(0, (buffer.size,), torch.uint8)

    def _bytes(self, tensor: Tensor, window: int) -> torch.Tensor:
        place = self._place(tensor, window)
        return self.buffers[place.buffer].tensor(place.offset, (tensor.bytes,), torch.uint8)


def buffer_name(tensor: Tensor) -> str:
    """Of the buffer that holds a tensor: no other buffer has its name, whatever the task calls it."""
    return f"tensor {tensor.name}"


@contextmanager
def given_file(task: Operation, tensors: Tensors) -> Iterator[str]:
    """Path of a file with the bytes of inputs and weights, for a process that launches alone."""
    folder = scratch.make_folder()
    try:
        path = folder / "given"
        with path.open("wb") as file:
            for tensor in _given(task):
                file.write(raw(tensors[tensor.name].cpu()).tobytes())
        yield str(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def largest_given(task: Operation) -> Tensor:
    """The input that a producer is most likely to be slow about."""
    return max(_given(task), key=lambda tensor: tensor.bytes)


def arena_bytes(tasks: Sequence[Operation], workspace_bytes: int, windows: int, *, rotates: bool) -> int:
    """About what an arena takes."""
    task = tasks[0]
    given, outputs = (sum(tensor.bytes for tensor in group) for group in (_given(task), task.outputs))
    stride = _record_stride(task)
    kept = largest_given(task).bytes + stride * _records(stride)
    return windows * given + (windows if rotates else 1) * outputs + kept + workspace_bytes


def _given(task: Operation) -> tuple[Tensor, ...]:
    return (*task.inputs, *task.weights)


def _all(task: Operation) -> tuple[Tensor, ...]:
    return (*task.inputs, *task.weights, *task.outputs)


def _record_stride(task: Operation) -> int:
    return sum(_up(output.bytes, TENSOR_ALIGN) for output in task.outputs)


def _records(stride: int) -> int:
    return max(2, min(MAX_RECORDS, RECORD_BYTES // max(1, stride)))


def _checked(output: Tensor, found: torch.Tensor) -> torch.Tensor:
    """As uint8 where it should be bool and holds something else."""
    if output.dtype == "bool" and bool((found.view(torch.uint8) > 1).any()):
        return found.view(torch.uint8)
    return found


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
