"""The process that launches CUDA candidates: our code alone runs on its host side. Started by `cuda_worker`.

Messages come over a socket as JSON, file descriptors of shared device memory beside them; each is answered by one. The
process is thrown away after any fault: a driver error is reported once and ends it. No torch here: it starts fast.
"""

import contextlib
import json
import os
import random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from cuda_l2.contract.cuda import Plan
from cuda_l2.machine import messages
from cuda_l2.machine.cuda.cupti import KernelTrace
from cuda_l2.machine.cuda.driver import Bound, DriverError, Graph, LaunchError, Loaded, MappedMemory, check, start
from cuda_l2.machine.cuda.helpers import Helpers
from cuda_l2.machine.cuda.segments import Segment, enqueue_fill
from cuda_l2.machine.fills import SCRATCH_BYTE
from cuda_l2.records import from_json
from cuda_l2.system import process_tree

MAX_MESSAGE_BYTES = 1 << 20
MAX_DESCRIPTORS = 200
"""A task may have 128 tensors; the kernel passes 253 at most."""
AWAIT_S = 3600.0
LOAD_EVERY = 2
"""Launches between times that another stream holds multiprocessors."""
TRAFFIC_BYTES = 256 << 20
"""What such load reads and writes: several times any cache."""
SPOILT = (0, 0.0), (1, 0.0), (0, 1 / 8)
"""A recorded round's first launches, and share of the others, that find shared memory, registers and local memory
spoilt. One of these is drawn: counts kept there may go on from the timed rounds, begin anew as in some, or get lost."""
FAR = 1 << 35
"""Bytes of addresses, at most, that stay free before memory where it is mapped the second time."""
ROUNDS_BEHIND = 16
"""Waves of blocks that a multiprocessor runs when a block of the candidate leaves it."""


class Worker:
    """One CUDA context. Candidates are loaded in slots: one, or several that are timed in turns.

    Public methods are the operations that messages name. Those that return nothing are answered by an empty message.
    """

    def __init__(self, helpers: Path) -> None:
        self.stream, self.beside, self.behind = start(streams=3)
        """For the candidate, for load beside it, and for what takes its place."""
        self.helpers = Helpers(helpers)
        self.buffers: dict[str, MappedMemory] = {}
        self.elsewhere: dict[str, MappedMemory] = {}
        """The same memory at other addresses."""
        self.guarded: dict[str, MappedMemory] = {}
        """Inputs and weights once more, where nobody can write; empty where the GPU has no such mappings."""
        self.drawn: dict[str, int] = {}
        """The address of each buffer at which candidates have it, and where this process writes what they read."""
        self.loaded: list[Loaded] = []
        self.loaded_from = ("", "")
        """The first one's cubin and plan: no variable outlives a launch, so that what is loaded may serve again."""
        self.addresses: list[list[dict[str, int]]] = []
        self.bound: list[dict[int, Bound]] = []
        """Both by slot and binding; bound when first launched."""
        self.graphs: list[Graph] = []
        self.trace: KernelTrace | None = None
        self.evicted: tuple[int, int] = (0, 0)  # address, bytes
        self.evictions = 0
        self.traffic: tuple[int, int] = (0, 0)
        self.words = 0  # of garbage

    def attach(self, sizes: dict[str, list[int]], given: list[str], descriptors: Sequence[int] = ()) -> None:
        """Map shared memory; sizes: bytes and granularity by name, in the order of the descriptors. None unmaps.

        All of it twice, so that of any two tensors either can have the lower address, and that they can lie near one
        another or far apart; what is given, inputs and weights, also where it can only be read.
        """
        self._unload()
        for mapping in (*self.buffers.values(), *self.elsewhere.values(), *self.guarded.values()):
            mapping.close()
        shared = list(zip(sizes.items(), descriptors, strict=True))
        self.drawn, self.guarded = {}, {}
        # the second time in the other order: whichever way addresses grow, each order of two tensors is as likely
        self.buffers, self.elsewhere = (
            {
                name: MappedMemory.imported(descriptor, size, grain, far=random.randrange(0, most + 1, grain))
                for (name, (size, grain)), descriptor in some
            }
            for some, most in ((shared, 0), (shared[::-1], FAR))
        )
        with contextlib.suppress(DriverError):
            for (name, size), descriptor in shared:
                if name in given:
                    self.guarded[name] = MappedMemory.imported(descriptor, *size, writable=False)
        for descriptor in descriptors:
            os.close(descriptor)

    def load(
        self, cubin: str, plan: str, places: list[dict[str, list[Any]]], slot: int = 0, guarded: bool = False
    ) -> None:
        """Load a candidate and bind it to several sets of addresses, given as buffer and offset.

        The first slot's throws away what was loaded before, unless it is the same; the next slot's is loaded beside it.
        Each time every buffer lies at one or the other of its addresses: which tensor lies behind which at a user's is
        not known either. guarded: inputs and weights lie where they can only be read.
        """
        known = slot == 0 and bool(self.loaded) and self.loaded_from == (cubin, plan)
        if slot == 0:
            self._unload(keep=int(known))
        if not known:
            self.loaded.append(Loaded(Path(cubin).read_bytes(), from_json(Plan, plan)))
        if slot == 0:
            self.loaded_from = (cubin, plan)
        self._drop_graphs()
        if slot == 0:
            self.drawn = {name: random.choice((self.buffers, self.elsewhere))[name].address for name in self.buffers}
        at = self.drawn | {name: mapping.address for name, mapping in self.guarded.items() if guarded}
        self.addresses[slot:] = [
            [{name: at[buffer] + offset for name, (buffer, offset) in place.items()} for place in places]
        ]
        self.bound[slot:] = [{}]
        self._on(slot, 0)  # what cannot be bound is refused here

    def launch(self, turns: list[dict[str, Any]]) -> None:
        """Launch once a turn, in order.

        Of a turn: `fill`, what is written before it; `spoil`, whether it meets garbage in shared and local memory and
        registers, else what the launch before left there; `plain`, whether what is written may be read ahead of its
        wait, so that a plain edge must lie between; `binding`; `keep`, what is copied away behind it. `fill` and `keep`
        are as `CudaArena.shared` has them.
        """
        for turn in turns:
            self._write(turn["fill"])
            if turn["spoil"]:
                self._spoil()
            elif turn["plain"]:
                self.helpers.relay(self.stream, programmatic=False)
            self._on(0, turn["binding"]).launch(self.stream)
            self._write(turn["keep"])
        self._wait()

    def launch_often(
        self, run: int, replays: int, looks: int, outputs: list[list[Any]], stride: int, binding: int
    ) -> None:
        """Replay a graph of `run` launches back to back, poison the outputs, launch once more and record the outputs.

        A graph, as timed launches are: where the device waits for the next launch, another process has it in between,
        and what the launch before left in shared memory is gone. looks: number of times that all this is done.
        outputs, stride: as `record_loaded` takes them.
        """

        def enqueue(stream: int) -> None:
            for _ in range(run):
                self._on(0, binding).launch(stream)

        graph = Graph(self.stream, enqueue)
        for look in range(looks):
            for _ in range(replays):
                graph.replay()
            for output in outputs:
                self._fill(output)
            self._on(0, binding).launch(self.stream)
            for output in outputs:
                self._keep(output, look * stride + output[4])
        self._wait()
        graph.destroy()

    def after_slow(
        self,
        source: list[Any],
        target: list[Any],
        size: int,
        ns: int,
        bindings: list[int],
        between: int,
        ordinary: bool,
        restored: list[list[Any]],
    ) -> None:
        """Launch behind a kernel that lets dependents begin, and copies only then.

        between: number of kernels between the two, each of which lets the next one begin at once. bindings: the
        launch's; before it those of launches of the candidate between the two, in place of the last of those kernels.
        ordinary: the first of them waits for the copy before it begins; a launch that finds what was there before comes
        ahead of all. restored: what is written at the end.
        """
        *own, binding = bindings
        if ordinary:
            self._on(0, binding).launch(self.stream)
        self.helpers.slow_copy(self.stream, self._address(source), self._address(target), -(-size // 16), ns)
        for number in range(between - len(own)):
            self.helpers.relay(self.stream, programmatic=number > 0 or not ordinary)
        for each in bindings:
            self._on(0, each).launch(self.stream)
        self._write(restored)
        self._wait()

    def loaded_launches(self, count: int, occupied: float, ns: int, binding: int) -> None:
        """Launch several times in a row while another stream takes its share of multiprocessors, caches and memory."""
        self._spoil()
        self._occupy(occupied, ns, traffic=True)
        for _ in range(count):
            self._on(0, binding).launch(self.stream)
        self._wait()
        self._wait(self.beside)

    def record_loaded(
        self,
        count: int,
        outputs: list[list[Any]],
        stride: int,
        scratch: list[list[Any]],
        occupied: float,
        ns: int,
        binding: int,
    ) -> None:
        """Launch several times, each on poisoned outputs and scratch and spoiled shared memory; record the outputs.

        Now and then another stream holds a share of the multiprocessors, for ns or a half, a quarter, an eighth of it,
        at times with traffic. A third spoils shared memory again wherever a block of the candidate has left.
        outputs: buffer, offset and bytes of each, the word that poisons it, where it lies in a record; stride: bytes
        from one record to the next. scratch: buffer, offset and bytes of each workspace.
        """
        stream = driver.CUstream(self.stream)
        for i in range(count):
            for output in outputs:
                self._fill(output)
            for place in scratch:
                filled = driver.cuMemsetD8Async(self._address(place), SCRATCH_BYTE, place[2], stream)
                check("cuMemsetD8Async", filled)
            self._spoil()
            turn, rest = divmod(i, LOAD_EVERY)
            if rest == 0:
                self._occupy(occupied, ns >> turn % 4, traffic=turn // 4 % 2 == 1)
            self._on(0, binding).launch(self.stream)
            self.helpers.spoil_behind(self.behind, self._garbage(), ROUNDS_BEHIND)
            for output in outputs:
                self._keep(output, i * stride + output[4])
        for each in (self.stream, self.beside, self.behind):
            self._wait(each)

    def capture(self, bindings: list[int], slot: int = 0) -> dict[str, Any]:
        """A graph of one launch on each binding, in order; answers its index."""

        def enqueue(stream: int) -> None:
            for binding in bindings:
                self._on(slot, binding).launch(stream)

        self.graphs.append(Graph(self.stream, enqueue))
        return {"graph": len(self.graphs) - 1}

    def record(
        self, bindings: list[int], kept: list[int], outputs: list[list[list[Any]]], stride: int, slot: int = 0
    ) -> None:
        """Launch on each binding in order as one graph, and copy the outputs of some launches away as they come.

        kept: numbers of launches in ascending order; outputs: each one's, as `record_loaded` takes them; copies go to
        the record buffer in turn, `stride` bytes apart. Launches find garbage where others find what the launch before
        left: none of them, the first, or a share.
        """
        first, share = random.choice(SPOILT)
        copies = dict(zip(kept, enumerate(outputs), strict=True))

        def enqueue(stream: int) -> None:
            for number, binding in enumerate(bindings):
                if number < first or random.random() < share:
                    self._spoil(slot)
                self._on(slot, binding).launch(stream)
                index, written = copies.get(number, (0, []))
                for output in written:
                    self._keep(output, index * stride + output[4])

        graph = Graph(self.stream, enqueue)
        graph.once()
        graph.destroy()

    def time(self, graph: int, warm: int, before: int, poisoned: list[list[Any]], slot: int) -> dict[str, Any]:
        """Device seconds of a replay of a slot's launches behind others of the graph `before`.

        poisoned: outputs that are poisoned between those and the timed one. Half of the times all of them find what
        earlier ones left in shared and local memory spoilt.
        """
        if warm and random.random() < 0.5:
            self._spoil(slot)
        self.helpers.settle(self.stream)

        def poison() -> None:
            for output in poisoned:
                self._fill(output)

        return {"seconds": self.graphs[graph].time(warm, poison if poisoned else None, self.graphs[before])}

    def evict(self, size: int) -> None:
        """Write so many bytes of our own, so that the next launch finds nothing of its operands in L2, and settle."""
        if self.evicted[1] < size:
            if self.evicted[0]:
                check("cuMemFree", driver.cuMemFree(self.evicted[0]))
            self.evicted = (int(check("cuMemAlloc", driver.cuMemAlloc(size))), size)
        self.evictions = (self.evictions + 1) % 256
        if size:
            written = driver.cuMemsetD8Async(self.evicted[0], self.evictions, size, driver.CUstream(self.stream))
            check("cuMemsetD8Async", written)
        self.helpers.settle(self.stream)
        self._wait()

    def traced(self, on: bool) -> None:
        """Start or end CUPTI's records; they cost every launch some time, later ones a little."""
        if on and self.trace is None:
            self.trace = KernelTrace()
        if not on and self.trace is not None:
            self.trace.close()
            self.trace = None

    def once(self, graph: int) -> dict[str, Any]:
        """One replay: host seconds, call to done; where traced the device's, first kernel's start to last one's end."""
        if self.trace is None:
            return {"seconds": self.graphs[graph].once()}
        self.trace.clear()
        self.graphs[graph].once()
        return {"seconds": self.trace.span_s()}

    def empty(self) -> dict[str, Any]:
        """Seconds of an empty kernel in a graph of many, and alone, as `once` takes it."""
        in_graph = self.helpers.empty_s(self.stream)
        self.graphs.append(self.helpers.empty_graph(self.stream))
        alone = sorted(self.once(len(self.graphs) - 1)["seconds"] for _ in range(9))
        self.graphs.pop()
        return {"graph_s": in_graph, "alone_s": alone[4]}

    def _spoil(self, slot: int = 0) -> None:
        """Leave garbage in shared memory, registers, and local memory as far as a slot's kernels have any."""
        self.helpers.spoil_shared(self.stream, self._garbage())
        self.helpers.spoil_local(self.stream, self._garbage(), self.loaded[slot].local_bytes)

    def _on(self, slot: int, binding: int) -> Bound:
        """A loaded candidate on a set of addresses."""
        bound = self.bound[slot]
        if binding not in bound:
            bound[binding] = self.loaded[slot].bind(self.addresses[slot][binding])
        return bound[binding]

    def _write(self, shared: list[list[Any]]) -> None:
        """Fill segments of shared memory."""
        segments = [
            Segment(self._address(place), place[2], place[3], self._address(place[4:]) if place[4:] else 0)
            for place in shared
        ]
        enqueue_fill(self.helpers, self.stream, segments)

    def _fill(self, output: list[Any]) -> None:
        """Poison an output: buffer, offset, bytes, and a 32-bit word, which repeats."""
        address, stream = self._address(output), driver.CUstream(self.stream)
        size, word = output[2:4]
        whole = size // 4 * 4
        if whole:
            check("cuMemsetD32Async", driver.cuMemsetD32Async(address, word, whole // 4, stream))
        if size - whole >= 2:
            check("cuMemsetD16Async", driver.cuMemsetD16Async(address + whole, word & 0xFFFF, 1, stream))
        if size % 2:  # elements of one byte: all four of the word are alike
            check("cuMemsetD8Async", driver.cuMemsetD8Async(address + size - 1, word & 0xFF, 1, stream))

    def _keep(self, output: list[Any], at: int) -> None:
        """Copy an output to a place in the record buffer."""
        if output[2]:
            target = self.buffers["record"].address + at
            copied = driver.cuMemcpyDtoDAsync(target, self._address(output), output[2], driver.CUstream(self.stream))
            check("cuMemcpyDtoDAsync", copied)

    def _occupy(self, share: float, ns: int, *, traffic: bool) -> None:
        """Hold a share of the multiprocessors from another stream for a while, once this one's work is done."""
        if traffic and not self.traffic[0]:
            self.traffic = (int(check("cuMemAlloc", driver.cuMemAlloc(TRAFFIC_BYTES))), TRAFFIC_BYTES)
        self._wait()  # what spoils shared memory needs whole multiprocessors
        self.helpers.occupy(self.beside, share, ns, self.traffic if traffic else (0, 0))

    def _garbage(self) -> int:
        """A word that is two NaNs of fp16 and of bf16, and one of fp32; bits and signs differ from launch to launch."""
        self.words += 1
        return 0x7FC07FC0 | self.words * 0x9E3779B1 >> 1 & 0x803F803F

    def _address(self, place: list[Any]) -> int:
        return int(self.drawn.get(place[0]) or self.buffers[place[0]].address) + int(place[1])

    def _wait(self, stream: int = 0) -> None:
        """Until a stream is done; the candidate's if not given."""
        check("cuStreamSynchronize", driver.cuStreamSynchronize(driver.CUstream(stream or self.stream)))

    def _unload(self, keep: int = 0) -> None:
        """Throw away what is loaded, but for the first so many."""
        self._drop_graphs()
        self.addresses, self.bound = [], []
        for loaded in self.loaded[keep:]:
            loaded.unload()
        self.loaded = self.loaded[:keep]

    def _drop_graphs(self) -> None:
        for graph in self.graphs:
            graph.destroy()
        self.graphs = []


def main() -> None:
    process_tree.end_with_parent()  # also in the middle of a kernel that never ends
    channel = socket.socket(fileno=int(sys.argv[1]))
    worker = Worker(Path(sys.argv[2]))
    channel.send(b"{}")
    while True:
        messages.wait(channel, AWAIT_S)
        data, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not data:
            return
        message = json.loads(data)
        if descriptors:
            message["descriptors"] = descriptors
        operation = message.pop("op")
        try:
            answer = getattr(worker, operation)(**message) or {}
        except LaunchError as error:
            answer = {"refused": str(error)}
        except DriverError as error:
            mapping = operation == "attach"  # nothing of a candidate's is at work
            answer = {"machine" if error.of_machine or mapping else "fault": str(error)}
        channel.send(json.dumps(answer).encode())
        if "fault" in answer or "machine" in answer:
            os._exit(1)


if __name__ == "__main__":
    main()
