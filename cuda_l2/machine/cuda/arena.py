"""Device memory for one task: tensors by name, in windows, and workspaces, with guards around them.

The same memory is laid out anew for other sizes of the task.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from cuda_l2.contract import ContractError
from cuda_l2.contract.cuda import Plan, Workspace
from cuda_l2.machine.cuda import buffers
from cuda_l2.machine.cuda.buffers import Place
from cuda_l2.machine.cuda.segments import Segment, filled
from cuda_l2.machine.cuda.windows import (
    MOST_PAIRINGS,
    TENSOR_ALIGN,
    Sharing,
    buffer_name,
    record_stride,
    records,
    staged_bytes,
)
from cuda_l2.machine.fills import GUARD_BYTE, POISON_WORDS, SCRATCH_BYTE
from cuda_l2.machine.tensors import Tensors, rounded_up, stored, view
from cuda_l2.records import Task, Tensor
from cuda_l2.system.closing import Closing

GUARD_BYTES = 4096
GUARD_WORD, SCRATCH_WORD = 0x01010101 * GUARD_BYTE, 0x01010101 * SCRATCH_BYTE
OUTSIDE = "wrote outside its outputs and workspaces"
NOT_RESTORED = "left a persistent workspace other than it found it"
WORKSPACE_ALIGN = 1024
MESSAGE_TENSORS = 1024
"""Tensors of all launches that one message asks for."""
WORKSPACE_SLACK = 32 * GUARD_BYTES
"""For guards and alignment beside the workspaces themselves."""
T = TypeVar("T")


class CudaArena(Closing):
    """Shared device memory for a task, at its own sizes and at others. A context manager; views die with it.

    Tensors lie either snug, ending where their mapping ends, so that one step too far faults; or aligned as torch's
    allocator would, for timing. Timed launches alternate between windows at the first task's sizes, the others have
    one: each launch meets other inputs, so that it changes what the last one wrote, or has outputs of its own. A place
    says which windows a launch has its tensors in.

    tasks: the task, and the same at the other sizes. beside: further tensors that every window has.
    """

    records: int
    """Number of launches whose outputs can be kept at once."""
    record_stride: int
    """Bytes from one record to the next."""

    def __init__(
        self,
        tasks: Sequence[Task],
        workspace_bytes: int,
        *,
        windows: int = 1,
        sharing: Sharing = Sharing.SEPARATE,
        beside: Sequence[Tensor] = (),
    ) -> None:
        self.workspace_bytes, self.sharing = workspace_bytes, sharing
        self._tasks, self._most_windows, self._beside = tasks, windows, tuple(beside)
        spans = [self._spans_of(task) for task in tasks]
        sizes = {buffer: max(each[buffer] for each in spans) + 2 * GUARD_BYTES for buffer in spans[0]}
        # where a slow producer has a tensor from, and launches in a row have theirs from
        sizes["staging"] = max(staged_bytes(task) for task in tasks) + TENSOR_ALIGN
        strides = [record_stride(task) for task in tasks]
        sizes["record"] = max(stride * records(stride) for stride in strides)
        sizes["workspace"] = workspace_bytes + WORKSPACE_SLACK
        self.buffers: dict[str, buffers.SharedBuffer] = {}
        try:
            for name, size in sizes.items():
                self.buffers[name] = buffers.SharedBuffer(size)
        except BaseException:
            self.close()
            raise
        self._workspaces: list[list[tuple[int, Workspace[int]]]] = []
        """Every slot's workspaces, each with its offset."""
        self._layouts: dict[tuple[Task, bool], dict[Hashable, Any]] = {}
        """What follows from each layout: every launch of a check of every candidate asks for it."""
        self._known, self._of_workspaces = dict[Hashable, Any](), dict[Hashable, Any]()
        """The same of the layout of now, and what follows from its workspaces too."""
        self.select(tasks[0])

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self.task.tensors, *self._beside)

    def _spans_of(self, task: Task) -> dict[str, int]:
        """Bytes of each tensor's buffer that hold its windows; sets what the layout depends on."""
        self.task, self.windows = task, self._most_windows if task == self._tasks[0] else 1
        self._shift = {tensor.name: self.sharing.shift(task, tensor) for tensor in self._tensors}
        return {
            buffer_name(tensor): tensor.bytes + (self.windows - 1) * self._shift[tensor.name]
            for tensor in self._tensors
        }

    def select(self, task: Task, *, snug: bool = False, gap: int = 0) -> None:
        """Lay the memory out for this task, one of those given; what it held before is of no meaning.

        snug: the first window's tensors end where their mapping ends, so that one step too far faults, or `gap` bytes
        before; else they are aligned as torch's allocator would, with guards between windows that lie apart.
        """
        spans = self._spans_of(task)
        self._known = {} if gap else self._layouts.setdefault((task, snug), {})
        self._of_workspaces = {}
        self.used = 1 if snug else self.windows
        """Number of windows there are in this layout."""
        self._offsets: dict[str, int] = {}
        self._guards: list[torch.Tensor] = []
        """All bytes around what candidates are given, to where nothing is mapped."""
        for tensor in self._tensors:
            name = buffer_name(tensor)
            whole, size = self._whole(name), tensor.bytes if snug else spans[name]
            start = (len(whole) - size - gap) // TENSOR_ALIGN * TENSOR_ALIGN if snug else GUARD_BYTES
            self._offsets[tensor.name] = start
            self._guards += [whole[:start], whole[start + size :]]
            packed = self.sharing is Sharing.PACKED or (
                self.sharing is Sharing.OVERLAPPING and tensor not in self.task.outputs
            )
            apart = not snug and not packed and self._shift[tensor.name]
            for window in range(self.windows - 1 if apart else 0):
                behind = self._offset(tensor.name, window) + tensor.bytes
                self._guards.append(whole[behind : self._offset(tensor.name, window + 1)])
        for band in self._guards:
            band.fill_(GUARD_BYTE)
        self.record_stride, self.records = record_stride(task), records(record_stride(task))

    @property
    def pairings(self) -> int:
        """Number of ways in which windows of inputs and outputs are paired."""
        return min(MOST_PAIRINGS, self.windows)

    @property
    def place_count(self) -> int:
        """Number of places in this layout."""
        return self.used * self.pairings if self.used == self.windows else 1

    def window_of(self, tensor: Tensor, place: int) -> int:
        """The window in which a place has a tensor. Of A, B and C of a product no two places share two."""
        pairing, window = divmod(place, self.windows)
        if tensor in self.task.outputs:
            return (window + pairing) % self.windows
        return pairing if self.sharing is Sharing.OVERLAPPING and tensor != self.task.inputs[0] else window

    def covering(self, rng: np.random.Generator) -> list[int]:
        """Random places that together have every window of every tensor: few, six at most for A, B and C of four."""
        places = [int(place) for place in rng.permutation(self.place_count)]
        has = {place: {self.place(tensor, place) for tensor in self.task.tensors} for place in places}
        left, found = set().union(*has.values()), list[int]()
        while left:
            found.append(max(places, key=lambda place: len(has[place] & left)))
            left -= has[found[-1]]
        return found

    def tensor(self, tensor: Tensor, place: int = 0) -> torch.Tensor:
        """A view of a tensor at a place; as uint8 where it should be bool and holds something else."""
        start, end = self._bounds(tensor, place)
        return view(self._whole(buffer_name(tensor))[start:end], tensor)

    def span(self, tensor: Tensor) -> torch.Tensor:
        """Bytes of a tensor from its first window's beginning to its last one's end."""
        end = self._offset(tensor.name, self.windows - 1) + tensor.bytes
        return self._whole(buffer_name(tensor))[self._offsets[tensor.name] : end]

    def shift(self, tensor: Tensor) -> int:
        """Bytes from one window of a tensor to the next; 0 where they share it."""
        return self._shift[tensor.name]

    def holds(self, tensor: Tensor) -> bool:
        """Whether the arena has a tensor, of the task or beside it."""
        return tensor in self._tensors

    def given(self, place: int = 0) -> dict[str, torch.Tensor]:
        """Inputs and weights at a place."""
        return {tensor.name: self.tensor(tensor, place) for tensor in self.task.given}

    def outputs(self, place: int = 0) -> dict[str, torch.Tensor]:
        """Outputs at a place."""
        return {tensor.name: self.tensor(tensor, place) for tensor in self.task.outputs}

    def recorded_bytes(self, count: int) -> torch.Tensor:
        """Memory of the first `count` records."""
        return self._whole("record")[: count * self.record_stride]

    def recorded(self, number: int, copied: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Outputs that one of the launches recorded last gave: where they lie, or in a copy of the records."""
        found, start = {}, number * self.record_stride
        for output in self.task.outputs:
            memory = self._whole("record") if copied is None else copied
            found[output.name] = view(memory[start : start + output.bytes], output)
            start += rounded_up(output.bytes, TENSOR_ALIGN)
        return found

    def written(self, place: int = 0) -> list[list[Any]]:
        """Outputs at a place as the worker poisons and records them.

        Buffer, offset, bytes, the word that poisons it, where it lies in a record.
        """
        found, at = [], 0
        for output in self.task.outputs:
            where = self.place(output, place)
            found.append([where.buffer, where.offset, output.bytes, POISON_WORDS[output.dtype], at])
            at += rounded_up(output.bytes, TENSOR_ALIGN)
        return found

    def records_of(self, number: int, place: int) -> list[Segment]:
        """A record that is to hold the outputs at a place."""
        return list(self._once(("record", number, place), lambda: self._records_of(number, place)))

    def _records_of(self, number: int, place: int) -> list[Segment]:
        start = self.address(Place("record", number * self.record_stride))
        return [
            Segment(start + at, output.bytes, source=self._address(output, place))
            for output, (*_, at) in zip(self.task.outputs, self.written(place), strict=True)
            if output.bytes
        ]

    def place(self, tensor: Tensor, place: int = 0) -> Place:
        """Where a place has a tensor."""
        key = "place", tensor.name, place
        return self._once(key, lambda: Place(buffer_name(tensor), self._bounds(tensor, place)[0]))

    def places(self, plan: Plan, slot: int = 0) -> list[dict[str, Place]]:
        """Where a plan's pointers lie, at each place; lays out its workspaces."""
        workspaces = self._lay_out(plan, slot)
        return [
            {tensor.name: self.place(tensor, place) for tensor in self.task.tensors} | workspaces
            for place in range(self.place_count)
        ]

    def _lay_out(self, plan: Plan, slot: int = 0) -> dict[str, Place]:
        """Where a plan's workspaces lie: behind those of the kernels in the slots before it.

        Workspaces of later slots are forgotten. ContractError where there is not enough memory.
        """
        found: dict[str, Place] = {}
        own: list[tuple[int, Workspace[int]]] = []
        self._workspaces, self._of_workspaces = [*self._workspaces[:slot], own], {}
        end = max((_behind(*place) for kernel in self._workspaces for place in kernel), default=GUARD_BYTES)
        for workspace in plan.workspaces:
            found[workspace.name] = Place("workspace", end)
            own.append((end, workspace))
            end = _behind(end, workspace)
        if end + GUARD_BYTES > self.buffers["workspace"].size:
            raise ContractError("the workspaces, with the guards around them, are more than a candidate may have")
        return found

    def address(self, place: Place) -> int:
        """A place's address in this process."""
        return self.buffers[place.buffer].address + place.offset

    def stage(self, tensor: Tensor, values: torch.Tensor) -> None:
        """Put a tensor into the staging buffer, where a slow producer has it from; guard bytes behind it."""
        staging = self._whole("staging")
        staging[: tensor.bytes].copy_(stored(values, tensor))
        staging[tensor.bytes :][: -tensor.bytes % TENSOR_ALIGN].fill_(GUARD_BYTE)

    @property
    def in_a_row(self) -> int:
        """Number of launches whose tensors can be staged, and whose outputs recorded, at once."""
        each = sum(2 * rounded_up(tensor.bytes, TENSOR_ALIGN) for tensor in self.task.tensors)
        room, named = int(self.buffers["staging"].size) // max(1, each), MESSAGE_TENSORS // len(self.task.tensors)
        return max(1, min(self.records, room, named))

    def shared(self, segment: Segment) -> list[Any]:
        """A segment as the worker finds it: buffer, offset, bytes, word, and its source's buffer and offset if any."""
        source = self._place_of(segment.source) if segment.source else ()
        return [*self._place_of(segment.address), segment.bytes, segment.word, *source]

    def _place_of(self, address: int) -> tuple[str, int]:
        """The buffer that an address of this process lies in, and where."""
        for name, buffer in self.buffers.items():
            if 0 <= address - buffer.address < buffer.size:
                return name, address - buffer.address
        raise AssertionError("the address is none of the arena's")

    def before_launch(self, tensors: Tensors, prefill: Tensors | None = None, place: int = 0) -> list[Segment]:
        """What a place is to hold before a launch: inputs, weights, and outputs poisoned or as given."""
        segments = self.held(tensors, place)
        for output in self.task.outputs:
            source = prefill[output.name].data_ptr() if prefill else 0
            segments.append(Segment(self._address(output, place), output.bytes, POISON_WORDS[output.dtype], source))
        return [segment for segment in segments if segment.bytes]

    def held(self, tensors: Tensors, place: int = 0) -> list[Segment]:
        """What a place's inputs and weights are to hold, before a launch and after it.

        The tensors must lie in memory as the task's do, and stay.
        """
        given = self._once(("given", place), lambda: self._lying(self.task.given, place))
        return [Segment(address, size, source=tensors[name].data_ptr()) for name, address, size in given]

    def _lying(self, tensors: Sequence[Tensor], place: int) -> list[tuple[str, int, int]]:
        """Names, addresses and bytes of those that have any."""
        return [(tensor.name, self._address(tensor, place), tensor.bytes) for tensor in tensors if tensor.bytes]

    def outside(self, place: int | None = None) -> list[Segment]:
        """Guard bytes in all windows but a place's, and in tensors beside the task's, which are none of its."""
        return self._once(("outside", place), lambda: self._outside(place))

    def _outside(self, place: int | None) -> list[Segment]:
        found = []
        for tensor in self._tensors:
            start, end = self._offset(tensor.name, 0), self._offset(tensor.name, self.used - 1) + tensor.bytes
            own = self._bounds(tensor, place) if place is not None and tensor in self.task.tensors else (end, end)
            found += [self._guard(tensor, start, own[0]), self._guard(tensor, own[1], end)]
        return [segment for segment in found if segment.bytes]

    def left(self, before: int, place: int) -> list[Segment]:
        """Guard bytes where a place has tensors and another one, which is used after it, has none."""
        return self._once(("left", before, place), lambda: self._left(before, place)) if before != place else []

    def _left(self, before: int, place: int) -> list[Segment]:
        found = []
        for tensor in self.task.tensors:
            (start, end), (own, own_end) = self._bounds(tensor, before), self._bounds(tensor, place)
            found += [self._guard(tensor, start, min(end, own)), self._guard(tensor, max(start, own_end), end)]
        return [segment for segment in found if segment.bytes > 0]

    def unwritten(self, place: int) -> list[Segment]:
        """Guard bytes in a place's outputs."""
        return [self._guard(output, *self._bounds(output, place)) for output in self.task.outputs if output.bytes]

    def copied_poison(self, output: Tensor) -> Segment:
        """The beginning of the record buffer, if it holds the poison of an output."""
        return Segment(self.address(Place("record", 0)), output.bytes, POISON_WORDS[output.dtype])

    def elsewhere(self) -> list[Segment]:
        """Guard bytes in all else that is mapped: behind the workspaces, and what the runtime itself uses."""
        end = max((_behind(*place) for kernel in self._workspaces for place in kernel), default=GUARD_BYTES)
        return [
            filled(self._whole("workspace")[end:], GUARD_WORD),
            *(filled(self._whole(name), GUARD_WORD) for name in ("staging", "record")),
        ]

    def poisons(self) -> list[Segment]:
        """What outputs of every window are to hold before a round."""
        return [
            Segment(self._address(output, window), output.bytes, POISON_WORDS[output.dtype])
            for window in range(self.windows)
            for output in self.task.outputs
            if output.bytes
        ]

    def forget_records(self) -> None:
        """Leave no output there: NaN where there is one."""
        self._whole("record").fill_(0xFF)

    def fill_workspaces(self, *, persistent: bool, slot: int = 0) -> None:
        """Write garbage into scratch workspaces and guards behind all; the fill into persistent ones where asked."""
        for workspace, words, guard in self._laid_out(slot):
            if not workspace.persistent:
                words.view(torch.uint8).fill_(SCRATCH_BYTE)
            elif persistent:
                words.fill_(_signed(workspace.fill))
            guard.fill_(GUARD_BYTE)

    def scratch(self) -> list[Segment]:
        """What workspaces are to hold before a launch, the persistent ones apart: garbage, and guards behind all."""
        return self._once("scratch", self._scratch, self._of_workspaces)

    def _scratch(self) -> list[Segment]:
        places = self._laid_out()
        garbage = [filled(words, SCRATCH_WORD) for workspace, words, _ in places if not workspace.persistent]
        return garbage + self.workspace_guards()

    def workspace_guards(self) -> list[Segment]:
        """What must lie behind every workspace."""
        return [filled(guard, GUARD_WORD) for _, _, guard in self._laid_out()]

    def after_launch(self, place: int = 0) -> tuple[list[Segment], list[Segment]]:
        """What memory must hold after it: guards, and persistent workspaces as they were filled."""
        return self._once(("after", place), lambda: self._after_launch(place), self._of_workspaces)

    def _after_launch(self, place: int) -> tuple[list[Segment], list[Segment]]:
        places = self._laid_out()
        guards = [band for band in self._guards if band.numel()] + [guard for _, _, guard in places]
        persistent = [filled(words, workspace.fill) for workspace, words, _ in places if workspace.persistent]
        return [filled(guard, GUARD_WORD) for guard in guards] + self.outside(place), persistent

    def damage(self, slot: int = 0) -> str:
        """What a launch changed that it must not, in a few words; empty where it kept its bounds."""
        places = self._laid_out(slot)
        bands = [*self._guards, *(guard for _, _, guard in places)]
        kept = [(words == _signed(workspace.fill)).all() for workspace, words, _ in places if workspace.persistent]
        found = torch.stack([*((band == GUARD_BYTE).all() for band in bands), *kept]).tolist()
        if not all(found[: len(bands)]):
            return OUTSIDE
        if not all(found[len(bands) :]):
            return NOT_RESTORED
        return ""

    def close(self) -> None:
        if self.buffers:
            torch.cuda.synchronize()  # nothing may be at work in memory that goes
        for buffer in self.buffers.values():
            buffer.close()
        self.buffers = {}

    def _once(self, key: Hashable, make: Callable[[], T], known: dict[Hashable, Any] | None = None) -> T:
        known = self._known if known is None else known
        if key not in known:
            known[key] = make()
        found: T = known[key]
        return found

    def _laid_out(self, slot: int = 0) -> list[tuple[Workspace[int], torch.Tensor, torch.Tensor]]:
        """A slot's workspaces, each with its 32-bit words and the guard bytes behind them."""
        found, memory = [], self._whole("workspace")
        for start, workspace in self._workspaces[slot]:
            end = start + rounded_up(workspace.bytes, 4)
            found.append((workspace, memory[start:end].view(torch.int32), memory[end : end + GUARD_BYTES // 2]))
        return found

    def _address(self, tensor: Tensor, place: int = 0) -> int:
        return self._once((tensor.name, place), lambda: self.address(self.place(tensor, place)))

    def _bounds(self, tensor: Tensor, place: int) -> tuple[int, int]:
        """Where a place's tensor begins and ends in its buffer."""
        start = self._offset(tensor.name, self.window_of(tensor, place))
        return start, start + tensor.bytes

    def _guard(self, tensor: Tensor, start: int, end: int) -> Segment:
        """Guard bytes in a tensor's buffer."""
        return Segment(self.address(Place(buffer_name(tensor), start)), end - start, GUARD_WORD)

    def _offset(self, name: str, window: int) -> int:
        return self._offsets[name] + window * self._shift[name]

    def _whole(self, name: str) -> torch.Tensor:
        """The bytes of a buffer."""
        return self.buffers[name].bytes


def _behind(start: int, workspace: Workspace[int]) -> int:
    """Where what follows a workspace and its guard begins."""
    return start + rounded_up(workspace.bytes, WORKSPACE_ALIGN) + GUARD_BYTES


def _signed(word: int) -> int:
    """A 32-bit word as an int32 has it."""
    return word - (1 << 32) if word >> 31 else word
